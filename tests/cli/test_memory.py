"""What fits into a machine, and into a control group of it, before anything starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvxfer.cli.memory import Need, check_memory, needs_of
from kvxfer.doctor.host import free_host_nbytes
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.model_config import DEFAULT_MODEL, shard_for
from kvxfer.engine.weights import load_weights
from kvxfer.errors import ConfigError

GIB = 1 << 30
NAMES = {"pool": "--block-size"}


def engine(**changes: object) -> EngineConfig:
    config = EngineConfig(role=Role.PREFILL, engine_id="prefill", num_blocks=10, tp_size=2)
    return msgspec.structs.replace(config, **changes)


def test_an_engine_needs_its_pools_and_weights() -> None:
    pool, weights = needs_of(engine(), DEFAULT_MODEL, NAMES)
    # 10 blocks of 16 tokens, 2 planes x 4 layers x 8 heads x 64 x 4 bytes; on both ranks together
    assert pool.nbytes == 10 * 16 * 2 * 4 * 8 * 64 * 4
    assert pool.options == "--block-size"
    assert weights.options == "--model"
    loaded = [load_weights(DEFAULT_MODEL, shard_for(DEFAULT_MODEL, rank, 2)) for rank in (0, 1)]
    exact = 0
    for each in loaded:
        tensors = [each.embedding, each.lm_head, each.final_norm]
        tensors += [getattr(layer, name) for layer in each.layers for name in layer.__slots__]
        tensors = [tensor for tensor in tensors if tensor is not None]  # of layers with a state
        exact += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert weights.nbytes == pytest.approx(exact, rel=0.01)  # less the norms


def test_gpus_have_memory_of_their_own() -> None:
    assert needs_of(engine(device="cuda"), DEFAULT_MODEL, NAMES) == ()


def test_all_needs_together_have_to_fit_and_the_largest_is_named() -> None:
    needs = (Need(GIB, "a", "--a"), Need(3 * GIB, "b", "--b"), Need(2 * GIB, "c", "--c"))
    check_memory(needs, 6 * GIB)
    check_memory(needs, None)
    with pytest.raises(ConfigError) as refused:
        check_memory(needs, 6 * GIB - 1)
    assert str(refused.value) == (
        "--b: expected engines that fit into 6 GiB of free memory, got 6 GiB, 3 GiB of it "
        "for b; choose less"
    )


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  8388608 kB\nMemAvailable:    4194304 kB\n"}  # 8 and 4 GiB
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "free_nbytes"),
    [
        ({}, 4 * GIB),
        # the group of a pod above ours has less left
        (
            {
                "proc/self/cgroup": "0::/pod/container\n",
                f"{V2}/pod/container/memory.max": "max\n",
                f"{V2}/pod/memory.max": f"{3 * GIB}\n",
                f"{V2}/pod/memory.current": f"{2 * GIB}\n",
                f"{V2}/pod/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
            },
            3 * GIB // 2,
        ),
        # inside a container the mount's root is our group, whatever its path outside
        (
            {
                "proc/self/cgroup": "0::/../elsewhere\n",
                f"{V2}/memory.max": f"{GIB}\n",
                f"{V2}/memory.current": "0\n",
            },
            GIB,
        ),
        # the first version: no limit at the root, one in the group
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/a\n1:name=systemd:/\n0::/\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/a/memory.limit_in_bytes": f"{2 * GIB}\n",
                f"{V1}/a/memory.usage_in_bytes": f"{GIB}\n",
                f"{V1}/a/memory.stat": "inactive_file 7\ntotal_inactive_file 4096\n",
            },
            GIB + 4096,
        ),
        # used up
        (
            {
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": "5\n",
                f"{V2}/memory.current": "9\n",
            },
            0,
        ),
        # the machine has less than the group may take
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{64 * GIB}\n"}, 4 * GIB),
    ],
)
def test_what_is_free(tmp_path: Path, files: dict[str, str], free_nbytes: int) -> None:
    assert free_host_nbytes(write(tmp_path, MEMINFO | files)) == free_nbytes


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert free_host_nbytes(tmp_path) is None


def test_this_machine() -> None:
    free_nbytes = free_host_nbytes()
    assert free_nbytes is not None
    assert 0 < free_nbytes < 1 << 50
