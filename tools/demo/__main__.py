"""python -m binidx.tools.demo"""

import sys

from . import main

sys.exit(main())
