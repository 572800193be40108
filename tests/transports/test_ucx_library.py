"""UCX as a library: what is missing, what it is told, tags."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transports.nixl_agent import NixlAgent
from kvxfer.transports.ucx_library import check_version, settings
from kvxfer.transports.ucx_pipe import UcxPipe, tag_of
from tests.helpers import needs_nixl, needs_ucxx

CPU = torch.device("cpu")


def run_alone(code: str, ucx: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where these are the variables of UCX."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith("UCX_")} | ucx
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(TransportUnavailable, match=r"expected ucxx, got .*; pip install .ucxx"):
        UcxPipe(CPU, Config(), lambda: None)


def test_an_old_version_is_refused() -> None:
    check_version("0.51.1")
    check_version("1.2.3")
    with pytest.raises(TransportUnavailable, match=r"0\.51 or newer, got 0\.46\.00; pip install"):
        check_version("0.46.00")


@needs_ucxx
def test_the_environment_stays_as_it_was() -> None:
    """ucxx sets options of UCX for the whole process, NIXL's included, when it is imported."""
    code = (
        "import os\n"
        "os.environ['UCX_RNDV_FRAG_MEM_TYPE'] = 'host'\n"
        "from kvxfer.transports.ucx_library import Ucx\n"
        "Ucx()\n"
        "assert {n for n in os.environ if n.startswith('UCX_')} == {'UCX_RNDV_FRAG_MEM_TYPE'}\n"
        "assert os.environ['UCX_RNDV_FRAG_MEM_TYPE'] == 'host'\n"
    )
    done = run_alone(code, {})
    assert done.returncode == 0, done.stderr


def test_settings() -> None:
    host = settings(CPU, ("eth0", "mlx5_0:1"), {})
    assert host == {
        "TLS": "^sm,self",
        "TCP_TX_SEG_SIZE": "256k",
        "TCP_RX_SEG_SIZE": "256k",
        "TCP_CONN_NB": "y",  # to a peer that has died
        "RCACHE_ENABLE": "y",  # or a death in the midst of a chunk is this process's own
        "RNDV_THRESH": "256000",  # less than a segment
        "NET_DEVICES": "eth0,mlx5_0:1",
    }
    environ = {"UCX_TLS": "tcp,cuda", "UCX_NET_DEVICES": "eth1"}
    gpu = settings(torch.device("cuda:0"), ("lo",), environ)
    assert not {"TLS", "NET_DEVICES"} & gpu.keys()  # what the environment says stays
    assert gpu["RNDV_THRESH"] == "8192"  # inf, which helps host memory, makes a GPU's crawl


def make_ucx_after(*others: bool) -> None:
    """Of several, in turn; True: an agent of NIXL's."""
    kept: list[object] = []
    for is_nixl in others:
        kept.append(NixlAgent(()) if is_nixl else UcxPipe(CPU, Config(), lambda: None))
    UcxPipe(CPU, Config(), lambda: None)


@needs_ucxx
@needs_nixl
@pytest.mark.parametrize(
    ("others", "environ", "error"),
    [
        ((False, True), {}, "expected UCX's hooks of memory functions, got none; has another UCX"),
        ((False, True), {"UCX_RCACHE_ENABLE": "try"}, ""),
        ((True, False), {}, ""),
        ((True, False, True, False), {}, ""),
        ((), {"UCX_MEM_EVENTS": "n"}, "expected UCX's hooks of memory functions, got none; has"),
        ((), {"UCX_TLS": "none-such"}, "expected a UCX that starts, got .*No such device"),
    ],
)
def test_ucx_is_refused_where_a_death_of_a_peer_would_be_its_own(
    others: tuple[bool, ...], environ: dict[str, str], error: str
) -> None:
    """Without hooks UCX has no cache of registrations, which it uses all the same when it ends what
    a dead peer had begun: a null pointer. NIXL's UCX takes the hooks of one that was there before.
    """
    code = f"from {__name__} import make_ucx_after; make_ucx_after(*{others})"
    done = run_alone(code, environ)
    if error:
        assert re.search(f"TransportUnavailable: ucx: {error}", done.stderr)
    else:
        assert done.returncode == 0, done.stderr


def test_tags_tell_apart() -> None:
    tags = {tag_of(c, s, g) for c in (0, 1, 2**32 - 1) for s in (0, 1, 4095) for g in (0, 1, 9)}
    assert len(tags) == 27
    assert max(tags) < 1 << 64
    assert tag_of(1, 2, 1 << 20) == tag_of(1, 2, 0)  # generations wrap
