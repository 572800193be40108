"""Where a slow link can be made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

needs_link = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists() or shutil.which("ip") is None,
    reason="needs root, /dev/net/tun and ip(8) for network namespaces",
)
