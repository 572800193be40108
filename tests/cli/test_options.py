"""What the commands were asked for, engines made of it, and pools that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cache.kv_cache_manager import KVCacheManager
from kvxfer.cache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from kvxfer.cli.commands import run_pair
from kvxfer.cli.options import (
    DecodeOptions,
    EngineOptions,
    HostPort,
    Layout,
    PairOptions,
    PrefillOptions,
    RunOptions,
    SideOptions,
    address_towards,
    naming_options,
    parse_address,
    parse_devices,
    place_sides,
)
from kvxfer.cli.prompts import Prompt
from kvxfer.cli.sides import (
    Work,
    fitted,
    pool_blocks,
    read_model,
    read_work,
    settings,
    single_engine,
    transfer_engine,
)
from kvxfer.engine.config import OnLoadFailure, Role
from kvxfer.engine.model_config import BUILT_IN_MODELS, DEFAULT_MODEL
from kvxfer.errors import ConfigError, ModelError

MODEL = EngineOptions()


def side(**changes: object) -> SideOptions:
    values: dict[str, object] = {
        "tp_size": 2,
        "block_size": 16,
        "layout": Layout.HND,
        "num_blocks": None,
        "prefix_caching": True,
    }
    return SideOptions(**{**values, **changes})  # type: ignore[arg-type]


def work(*lengths: int, new: int = 1, in_flight: int = 2) -> Work:
    return Work(tuple(Prompt("p", (0,) * n, new) for n in lengths), in_flight)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", HostPort("127.0.0.1", 80)),
        ("node7:5000", HostPort("node7", 5000)),
        ("[::1]:0", HostPort("[::1]", 0)),
    ],
)
def test_addresses(text: str, address: HostPort) -> None:
    assert parse_address("--listen", text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:x", "host:70000", "a@b:1", "a:1/x"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen: expected HOST:PORT, got "):
        parse_address("--listen", text)


@pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80", "*:80"])
def test_an_address_that_nobody_can_connect_to(text: str) -> None:
    with pytest.raises(ConfigError, match="that the other side can connect to"):
        parse_address("--listen", text)


@pytest.mark.parametrize("text", ["9400", "host:x", ":"])
def test_where_metrics_are_served_is_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="--metrics: expected HOST:PORT, got"):
        PrefillOptions(listen="127.0.0.1:0", metrics=text)
    assert DecodeOptions(prefill="127.0.0.1:1", metrics="0.0.0.0:9400").metrics is not None


def test_work_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one source of prompts"):
        RunOptions(prompts=Path("p"), trace=Path("t"))
    for name, option in (
        ("limit", "--limit"),
        ("max_new_tokens", "--max-new-tokens"),
        ("in_flight", "--in-flight"),
    ):
        with pytest.raises(ConfigError, match=f"{option}: expected at least 1, got 0"):
            RunOptions(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--json: .*nowhere is no folder"):
        RunOptions(json=tmp_path / "nowhere" / "x.json")


def sizing(*groups: KVCacheSpec) -> KVCacheManager:
    """An empty cache with these groups."""
    specs = [KVCacheGroupSpec([f"l{number}"], spec) for number, spec in enumerate(groups)]
    return KVCacheManager(KVCacheConfig(9, [], specs), enable_caching=False, max_step_tokens=2048)


FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=48
)


def test_pools_hold_the_longest_requests_in_flight() -> None:
    cache = sizing(FULL)
    # blocks of 16: 10+1 tokens 1, 32+1 tokens 3, 100+1 tokens 7; the two longest, and block 0
    assert work(10, 100, 32).num_blocks(cache, 0) == 11
    # all of them, so that prefixes stay; and no more than that
    assert work(10, 100, 32).num_blocks(cache, 1000) == 12
    assert work(15, in_flight=8).num_blocks(cache, 0) == 2
    assert work(16, in_flight=8).num_blocks(cache, 0) == 3


def test_pools_hold_all_groups_of_the_requests_in_flight() -> None:
    cache = sizing(FULL, WINDOW)
    # 1 + 3 + 7 blocks in each group, a step being longer than all of it
    assert work(10, 100, 32).num_blocks(cache, 0) == 21
    assert work(10, 100, 32).num_blocks(cache, 1000) == 23
    # 4001 tokens are 251 blocks; a window of 48 and a step of 2048 are 2095 tokens: 131 and one
    # more, as they may begin inside a block
    assert work(4000, in_flight=1).num_blocks(cache, 0) == 1 + 251 + 132
    # an offer of 10 tokens keeps them while 4000 more are computed
    assert work(10, new=4000, in_flight=1).num_blocks(cache, 0) == 1 + 251 + 251


def test_pool_blocks_by_option_or_by_work() -> None:
    assert pool_blocks(side(num_blocks=5), DEFAULT_MODEL, work(1000)) == 5
    assert pool_blocks(side(), DEFAULT_MODEL, work(1000)) == 64
    # a block of 16 tokens on one of two ranks: 2 planes x 4 layers x 4 heads x 64 x 4 bytes x 16
    # = 128 KiB, so 512 MiB keep 4,096 blocks
    many = work(*[800] * 100)
    assert pool_blocks(side(), DEFAULT_MODEL, many) == 4097
    assert pool_blocks(side(tp_size=8), DEFAULT_MODEL, many) == 5101
    # two layers in a block instead of four: 8,192 blocks; 100 requests of 51 blocks in each group
    assert pool_blocks(side(), BUILT_IN_MODELS["hybrid"], many) == 8193
    assert pool_blocks(side(tp_size=8), BUILT_IN_MODELS["hybrid"], many) == 10201


def test_read_model_checks_every_tp_size() -> None:
    assert read_model(MODEL, [side(tp_size=tp_size) for tp_size in (1, 2, 8)]) == DEFAULT_MODEL
    with pytest.raises(ModelError, match="a divisor or a multiple of 8 KV heads, got 3"):
        read_model(MODEL, [side(tp_size=2), side(tp_size=3, of="decode")])
    with pytest.raises(ModelError, match="nowhere"):
        read_model(EngineOptions(model="/nowhere"), [side()])


def test_read_work(tmp_path: Path) -> None:
    assert len(read_work(RunOptions(), DEFAULT_MODEL).prompts) == 10
    file = tmp_path / "p.txt"
    file.write_text("a\nb\nc\n")
    options = RunOptions(prompts=file, limit=2, in_flight=3, max_new_tokens=8)
    found = read_work(options, DEFAULT_MODEL)
    assert found == Work((Prompt("line 1", (97,), 8), Prompt("line 2", (98,), 8)), 3)


def test_settings_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_LEASE_S", "7")
    monkeypatch.setenv("KVXFER_PORT", "1")
    found = settings(
        EngineOptions(),
        defaults={"log_level": "WARNING", "lease_s": 9.0, "port": 2},
        given={"port": 3},
    )
    assert (found.port, found.lease_s, found.log_level) == (3, 7.0, "WARNING")
    assert found.transport == "auto"
    options = EngineOptions(transport="zmq", log_level="DEBUG")
    found = settings(options, defaults={"log_level": "WARNING"})
    assert (found.transport, found.log_level) == ("zmq", "DEBUG")
    with pytest.raises(ConfigError, match=r"^--transport: expected one of auto, .*, got 'foo'$"):
        settings(EngineOptions(transport="foo"))


def test_engines() -> None:
    own = side(tp_size=4, block_size=24, layout=Layout.NHD, prefix_caching=False, num_blocks=9)
    kv = settings(MODEL, given={"port": 0})
    options = RunOptions(verify=True, on_load_failure=OnLoadFailure.FAIL)
    engine = transfer_engine(Role.DECODE, own, MODEL, DEFAULT_MODEL, kv)
    config = fitted(engine, own, options, DEFAULT_MODEL, work(99))
    assert (config.kv, config.max_num_seqs) == (kv, 64)
    assert fitted(engine, own, options, DEFAULT_MODEL, work(99, in_flight=70)).max_num_seqs == 70
    assert (config.engine_id, config.tp_size, config.block_size) == ("decode", 4, 24)
    assert (config.layout, config.num_blocks, config.max_model_len) == ("NHD", 9, 100)
    assert (config.digests, config.enable_prefix_caching) == (True, False)
    assert config.on_load_failure is OnLoadFailure.FAIL
    single = single_engine(MODEL, DEFAULT_MODEL, work(20, 100))
    assert (single.role, single.tp_size, single.block_size) == (Role.ALONE, 1, 16)
    assert (single.layout, single.enable_prefix_caching) == ("HND", False)
    assert (single.num_blocks, single.max_model_len) == (8, 101)


# ------------------------------------------------------------------ devices


@pytest.mark.parametrize(
    ("text", "devices"), [(None, ()), ("0", (0,)), ("2,0", (2, 0)), (" 1, 1 ", (1, 1))]
)
def test_devices_are_read(text: str | None, devices: tuple[int, ...]) -> None:
    assert parse_devices("--devices", text) == devices


@pytest.mark.parametrize("text", ["", "0,", "cuda:0", "-1", "1.5", "\u0661"])
def test_devices_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--devices: expected numbers of CUDA devices, as in 0,1"):
        parse_devices("--devices", text)


@pytest.mark.parametrize(
    ("num_devices", "prefill", "decode", "placed"),
    [
        # (ranks, given devices) of each side
        (4, (2, ()), (2, ()), ((0, 1), (2, 3))),
        (2, (1, ()), (1, ()), ((0,), (1,))),
        (1, (1, ()), (1, ()), ((0,), (0,))),
        (1, (2, ()), (1, ()), ((0, 0), (0,))),
        (2, (2, ()), (1, ()), ((0, 1), (0,))),
        (2, (1, ()), (2, ()), ((0,), (1, 0))),
        (3, (2, ()), (2, ()), ((0, 1), (2, 0))),
        (4, (1, ()), (2, (0, 1)), ((2,), (0, 1))),
        (4, (2, (3, 0)), (1, ()), ((3, 0), (1,))),
    ],
)
def test_prefill_ranks_come_first_then_decode_ranks_then_they_share(
    num_devices: int,
    prefill: tuple[int, tuple[int, ...]],
    decode: tuple[int, tuple[int, ...]],
    placed: tuple[tuple[int, ...], ...],
) -> None:
    sides = [
        side(tp_size=tp_size, device="cuda", devices=devices)
        for tp_size, devices in (prefill, decode)
    ]
    found = place_sides(sides, lambda: num_devices)
    assert tuple(each.devices for each in found) == placed


def test_devices_are_counted_only_where_that_decides() -> None:
    def count() -> int:
        raise AssertionError("counted")

    sides = (
        side(),
        side(device="cuda:1"),
        side(device="cuda", devices=(0, 1)),
        side(devices=(0, 1)),  # for the engine's settings to refuse
    )
    assert place_sides(sides, count) == sides
    with pytest.raises(ConfigError, match="--device: .* CUDA device, got none; say cpu"):
        place_sides((side(device="cuda"),), lambda: 0)


def test_engines_are_where_their_sides_are() -> None:
    model = read_model(MODEL, [side(tp_size=2)])
    own = side(device="cuda", devices=(3, 1))
    kv = settings(MODEL, given={"port": 0})
    config = transfer_engine(Role.PREFILL, own, MODEL, model, kv)
    assert config.rank_devices == ("cuda:3", "cuda:1")
    assert single_engine(MODEL, model, work(5), device="cuda:3").rank_devices == ("cuda:3",)
    assert single_engine(MODEL, model, work(5)).rank_devices == ("cpu",)


def test_both_sides_of_a_pair_are_told_apart() -> None:
    options = PairOptions(
        prefill_tp=3,
        decode_block_size=64,
        decode_layout=Layout.HND,
        prefill_blocks=7,
        decode_prefix_caching=False,
        device="cuda",
        prefill_devices="2,3,4",
        decode_devices="1",
    )
    prefill, decode = options.side("prefill"), options.side("decode")
    assert prefill == SideOptions(3, 16, Layout.HND, 7, True, "cuda", (2, 3, 4), "prefill")
    assert decode == SideOptions(1, 64, Layout.HND, None, False, "cuda", (1,), "decode")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("tp_size: expected 1, got 2", "--decode-tp: expected 1, got 2"),
        ("log_level: expected x, got 'y' (argument)", "--log-level: expected x, got 'y'"),
        ("log_level: expected x, got 'y' (environment)", "KVXFER_LOG_LEVEL: expected x, got 'y'"),
        ("lease_s: expected x, got 'y' (environment)", "KVXFER_LEASE_S: expected x, got 'y'"),
        ("lease_s: expected x, got y", "lease_s: expected x, got y"),
        ("engine decode: port: taken", "engine decode: --kv-port: taken"),
        (
            "engine decode: out of memory: of\n2 GiB",
            "engine decode: out of memory: of\n2 GiB",
        ),
        ("engine decode: ucx: expected ucxx", "engine decode: --transport ucx: expected ucxx"),
        ("--prompts: port: x", "--prompts: port: x"),
        ("no field at all", "no field at all"),
    ],
)
def test_errors_name_what_was_set(error: str, said: str) -> None:
    for kind in (ConfigError, ModelError):
        with pytest.raises(kind) as refused, naming_options(side(of="decode").option_names):
            raise kind(error)
        assert str(refused.value) == said


def test_options_by_the_fields_that_they_set() -> None:
    assert side(of="prefill", num_blocks=3).option_names == {
        "tp_size": "--prefill-tp",
        "block_size": "--prefill-block-size",
        "num_blocks": "--prefill-blocks",
        "devices": "--prefill-devices",
        "faults": "--prefill-faults",
        "pool": "--prefill-block-size, --prefill-blocks",
    }
    one = side().option_names
    assert (one["tp_size"], one["num_blocks"]) == ("--tp", "--num-blocks")
    assert one["pool"] == "--block-size, --max-new-tokens, --in-flight"


def test_faults_that_nobody_knows_are_of_one_side() -> None:
    with pytest.raises(ConfigError, match="^--decode-faults: expected one of read:stall"):
        run_pair(PairOptions(decode_faults="bogus"))


@pytest.mark.parametrize(
    ("peer", "own"),
    [
        (HostPort("127.0.0.1", 6000), "127.0.0.1"),
        (HostPort("[::1]", 6000), "::1"),
        (HostPort("localhost", 6000), "127.0.0.1"),
        (HostPort("no-such-host.invalid", 6000), "127.0.0.1"),  # the connection says what is wrong
    ],
)
def test_the_address_that_a_peer_sees(peer: HostPort, own: str) -> None:
    assert address_towards(peer) == own
