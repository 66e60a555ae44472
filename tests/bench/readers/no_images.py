"""Import before Streaming or LitData: they import torchvision for their images, and PyPI's is built for a CUDA torch.

Beside a torch for CPUs it fails to load. No image is read here, so the names that they ask it for suffice.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
}

for module, names in NAMES.items():
    found = sys.modules[module] = ModuleType(module)
    found.__spec__ = ModuleSpec(module, None)
    for name in names:
        setattr(found, name, type(name, (), {}))
