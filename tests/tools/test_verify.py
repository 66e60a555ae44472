"""binidx verify: 0 and the counts, or 1 and the first document."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.conversion import build

from binidx.tools import main


def test_sound_is_0_and_unsound_1(tmp_path: Path, capsys, caplog) -> None:
    source = build(tmp_path / "en", 100)
    assert main(["verify", source, "--vocab-size", "65536"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{source}: sound; ")
    assert "\n  100 tokens of uint16, 200 bytes\n" in out
    assert "all in a vocabulary of 65,536; read; there are no checksums to compare them with" in out
    assert err == ""
    assert main(["verify", source, "--engine", "local", "--workers", "1"]) == 0
    capsys.readouterr()
    assert caplog.messages == []
    assert main(["verify", source, "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_range"] is None
    assert main(["verify", source, "--vocab-size", "1"]) == 1
    assert "needed 0 to 0; document " in capsys.readouterr().err
    assert main(["verify", source, "--vocab-size", "1", "--quick"]) == 2
