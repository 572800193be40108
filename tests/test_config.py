import os
import re
import threading
import time
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import Config, load_config, variables_kept, variables_of
from kvxfer.errors import ConfigError
from kvxfer.transfer.wire import Keep, decode_to_source, encode

KEY, SECRET, OTHER = "k" * 40, "s" * 40, "o" * 40
DEFAULTS = {
    "transport": "auto",
    "host": "127.0.0.1",
    "port": None,
    "data_port": 0,
    "allowed_peers": None,
    "trust_network": False,
    "lease_s": 30.0,
    "keep_s": 5.0,
    "max_hold_s": 480.0,
    "pull_timeout_s": 10.0,
    "grow_offers": True,
    "early_wait_s": 30.0,
    "early_share": 0.5,
    "early_ahead": 0.25,
    "load_in_step_s": None,
    "peer_silent_s": 3.0,
    "connect_timeout_s": 5.0,
    "drain_timeout_s": 60.0,
    "chunk_nbytes": None,
    "staging_slots": None,
    "staging_nbytes": None,
    "zmq_streams": 0,
    "control_max_nbytes": 4194304,
    "launch_programs": 24,
    "min_gbps": None,
    "hash_seed": None,
    "curve_public_key": None,
    "curve_secret_key": None,
    "curve_server_keys": None,
    "curve_keys_dir": None,
    "params_key": None,
    "bind_tokens": True,
    "allow_cast": False,
    "offer_board": True,
    "verify": "off",
    "log_level": "INFO",
}


def load(
    arguments: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    return load_config(arguments or {}, extra, environ or {}).config


def test_defaults() -> None:
    loaded = load_config({}, {}, {})
    assert msgspec.structs.asdict(loaded.config) == DEFAULTS
    assert loaded.config == Config()
    assert loaded.origins == dict.fromkeys(DEFAULTS, "default")


def test_frozen() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        Config().port = 1  # type: ignore[misc]


def test_order_of_the_sources() -> None:
    environ = {f"KVXFER_{name}": "7.5" for name in ("LEASE_S", "MIN_GBPS", "PEER_SILENT_S")}
    environ["PATH"] = "/bin"
    loaded = load_config(
        {"lease_s": 9.0, "port": 1}, {"lease_s": 8.0, "min_gbps": 8.5, "port": 2}, environ
    )
    config, origins = loaded.config, loaded.origins
    assert (config.lease_s, origins["lease_s"]) == (9.0, "argument")
    assert (config.port, origins["port"]) == (1, "argument")
    assert (config.min_gbps, origins["min_gbps"]) == (8.5, "engine")
    assert (config.peer_silent_s, origins["peer_silent_s"]) == (7.5, "environment")
    assert (config.keep_s, origins["keep_s"]) == (5.0, "default")
    assert set(origins) == set(DEFAULTS)


def test_not_given_is_no_value() -> None:
    loaded = load_config({"port": None}, {"host": None}, {"KVXFER_PORT": "1", "KVXFER_HOST": ""})
    assert (loaded.config.port, loaded.origins["port"]) == (1, "environment")
    assert (loaded.config.host, loaded.origins["host"]) == ("127.0.0.1", "default")


def test_reads_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_PORT", "1234")
    assert load_config({}).config.port == 1234


def test_every_value_as_text() -> None:
    environ = dict(
        KVXFER_TRANSPORT="shm",
        KVXFER_HOST="::1",
        KVXFER_PORT="0",
        KVXFER_ALLOWED_PEERS="prefill-0, 10.1.0.0/16,",
        KVXFER_CHUNK_NBYTES="4096",
        KVXFER_MIN_GBPS="0.5",
        KVXFER_CURVE_PUBLIC_KEY=KEY,
        KVXFER_CURVE_SECRET_KEY=SECRET,
        KVXFER_CURVE_SERVER_KEYS=f"p0={KEY},p1={OTHER}",
        KVXFER_BIND_TOKENS="false",
        KVXFER_LOG_LEVEL="DEBUG",
    )
    config = load(environ=environ)
    assert (config.transport, config.host, config.port) == ("shm", "::1", 0)
    assert config.allowed_peers == ("prefill-0", "10.1.0.0/16")
    assert (config.chunk_nbytes, config.min_gbps) == (4096, 0.5)
    assert (config.curve_public_key, config.curve_secret_key) == (KEY, SECRET)
    assert config.curve_server_keys == {"p0": KEY, "p1": OTHER}
    assert (config.bind_tokens, config.log_level) == (False, "DEBUG")


def test_text_and_lists_from_an_engine() -> None:
    assert load({}, {"allowed_peers": "a,b"}).allowed_peers == ("a", "b")
    assert load({}, {"allowed_peers": ["a", "b"]}).allowed_peers == ("a", "b")
    assert load({}, {"lease_s": 20}).lease_s == 20.0


@pytest.mark.parametrize(
    ("environ", "seed"),
    [
        ({}, None),
        ({"PYTHONHASHSEED": "random"}, None),
        ({"PYTHONHASHSEED": ""}, None),
        ({"PYTHONHASHSEED": "0"}, b"0"),
        ({"PYTHONHASHSEED": "7", "KVXFER_HASH_SEED": "ünï"}, "ünï".encode()),
        ({"PYTHONHASHSEED": "7", "KVXFER_HASH_SEED": ""}, b"7"),
    ],
)
def test_hash_seed(environ: dict[str, str], seed: bytes | None) -> None:
    loaded = load_config({}, {}, environ)
    assert loaded.config.hash_seed_bytes == seed
    assert loaded.origins["hash_seed"] == ("default" if seed is None else "environment")
    assert load_config({"hash_seed": "mine"}, {}, environ).config.hash_seed_bytes == b"mine"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"port": [1]}, "port: expected `int | str`, got [1] (argument)"),
        ({"host": ""}, "host: expected a name or an address to listen on, got ''"),
        (
            {"transport": "udp"},
            "transport: expected one of auto, zmq, tcp, shm, cuda_ipc, ucx, nixl, "
            "got 'udp' (argument)",
        ),
        (
            {"verify": "some"},
            "verify: expected one of off, sample, all, got 'some' (argument)",
        ),
        (
            {"log_level": "LOUD"},
            "log_level: expected one of DEBUG, INFO, WARNING, ERROR, CRITICAL, "
            "got 'LOUD' (argument)",
        ),
        ({"transport": " - at `$.port`"}, "transport: expected one of auto, zmq, tcp, shm"),
        ({"lease_s": 0}, "lease_s: expected a finite number above 0, got 0.0"),
        ({"lease_s": "nan"}, "lease_s: expected a finite number above 0, got nan"),
        (
            {"lease_s": 86401},
            "lease_s: expected 0 to 86400 s, as a message may say it, got 86401.0",
        ),
        ({"max_hold_s": "inf"}, "max_hold_s: expected a finite number above 0, got inf"),
        ({"staging_slots": 0}, "staging_slots: expected 2 to 1024; with one slot nothing overlaps"),
        ({"staging_slots": 1}, "staging_slots: expected 2 to 1024; with one slot nothing overlaps"),
        ({"staging_slots": 1025}, "staging_slots: expected 2 to 1024"),
        ({"staging_nbytes": 8191}, "staging_nbytes: expected 8192 to 4294967296 bytes, got 8191"),
        (
            {"chunk_nbytes": 1 << 20, "staging_slots": 5, "staging_nbytes": (5 << 20) - 1},
            "staging_nbytes: expected room for 5 chunks (staging_slots) of 1048576 bytes "
            "(chunk_nbytes), got 5242879",
        ),
        (
            {"chunk_nbytes": 1 << 20, "staging_nbytes": (2 << 20) - 1},
            "staging_nbytes: expected room for 2 chunks (staging_slots) of 1048576 bytes",
        ),
        (
            {"staging_slots": 100, "staging_nbytes": 100 * 4096 - 1},
            "staging_nbytes: expected room for 100 chunks (staging_slots) of 4096 bytes",
        ),
        ({"chunk_nbytes": 4095}, "chunk_nbytes: expected 4096 to 67108864 bytes, got 4095"),
        ({"chunk_nbytes": (64 << 20) + 1}, "chunk_nbytes: expected 4096 to 67108864 bytes, got"),
        ({"chunk_nbytes": 1.5}, "chunk_nbytes: expected `int`, got 1.5 (argument)"),
        ({"control_max_nbytes": -4}, "control_max_nbytes: expected a finite number above 0, got"),
        ({"min_gbps": 0.0}, "min_gbps: expected a finite number above 0, got 0.0"),
        ({"lease_s": 1}, "lease_s: expected more than keep_s (5.0), got 1.0; a lease must"),
        ({"keep_s": 30}, "keep_s: expected less than lease_s (30.0), got 30.0; a lease must"),
        ({"lease_s": 481}, "lease_s: expected less than max_hold_s (480.0), got 481.0"),
        (
            {"bind_tokens": "maybe"},
            "bind_tokens: expected true or false, 1 or 0, got 'maybe' (argument)",
        ),
        ({"allowed_peers": ["10.0.0.1/8"]}, "allowed_peers: expected names, addresses and ranges"),
        ({"allowed_peers": ["127.1"]}, "allowed_peers: expected names, addresses and ranges"),
        ({"allowed_peers": ["a b"]}, "allowed_peers: expected names, addresses and ranges"),
        ({"allowed_peers": 5}, "allowed_peers: expected `array`, got 5 (argument)"),
        ({"allowed_peers": ["a", 5]}, "allowed_peers: expected `str`, got ['a', 5] (argument)"),
        ({"params_key": "k" * 15}, "params_key: expected at least 16 characters, got 15"),
        ({"curve_public_key": KEY}, "curve_secret_key: expected one beside the other key"),
        ({"curve_secret_key": KEY}, "curve_public_key: expected one beside the other key"),
        ({"curve_server_keys": {"p0": KEY}}, "curve_server_keys: expected this engine's own key"),
        ({"curve_server_keys": "p0"}, "curve_server_keys: expected ENGINE=KEY,..., got 'p0'"),
        (
            {"curve_public_key": KEY, "curve_secret_key": "short"},
            "curve_secret_key: expected 40 characters of Z85, got 5 characters",
        ),
        (
            {"curve_public_key": KEY, "curve_secret_key": SECRET, "curve_server_keys": "p0=x"},
            "curve_server_keys['p0']: expected 40 characters of Z85, got 1 characters",
        ),
        (
            {"lease": 1},
            "lease: expected a setting of kvxfer, got an unknown name (argument); did",
        ),
    ],
)
def test_refuses(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(values)


def test_says_which_source_was_wrong() -> None:
    with pytest.raises(ConfigError, match=re.escape("5700+rank, got 'x' (environment)")):
        load(environ={"KVXFER_PORT": "x"})
    with pytest.raises(ConfigError, match=r"lease: .* unknown name \(engine\)"):
        load({}, {"lease": 1})
    with pytest.raises(ConfigError, match=r"lease_s: expected more than keep_s .* \(environment\)"):
        load(environ={"KVXFER_LEASE_S": "1"})


def test_an_unknown_name_is_a_near_one_or_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"; did you mean lease_s\?$"):
        load({"leas_s": 1})
    with pytest.raises(ConfigError, match="; known are transport, host, port, "):
        load({"zzzz": 1})


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (
            "KVXFER_LEASE",
            "KVXFER_LEASE: no setting of kvxfer, ignored; did you mean KVXFER_LEASE_S?",
        ),
        ("KVXFER_ALOWED_PEERS", "ignored; did you mean KVXFER_ALLOWED_PEERS?"),
        ("KVXFER_ZZZZ", "KVXFER_ZZZZ: no setting of kvxfer, ignored; known are KVXFER_TRANSPORT, "),
        ("KVXFER_PORTS", "did you mean KVXFER_PORT?"),
    ],
)
@pytest.mark.parametrize("text", ["s3cret", ""])
def test_unknown_variables_are_heard_and_stop_nobody(
    caplog: pytest.LogCaptureFixture, variable: str, said: str, text: str
) -> None:
    assert load(environ={variable: text, "KVXFER_PORT": "9"}).port == 9
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "kvxfer.config")
    assert said in record.getMessage()
    assert ("known are" in record.getMessage()) is ("did you mean" not in said)
    assert "s3cret" not in record.getMessage()


# As Kubernetes sets them in every pod of a namespace with Services kvxfer and kvxfer-prefill-0, one
# port named http, one of UDP.
SERVICES = {
    "KVXFER_SERVICE_HOST": "10.0.0.1",
    "KVXFER_SERVICE_PORT": "5700",
    "KVXFER_SERVICE_PORT_HTTP": "5700",
    "KVXFER_PORT": "tcp://10.0.0.1:5700",
    "KVXFER_PORT_5700_TCP": "tcp://10.0.0.1:5700",
    "KVXFER_PORT_5700_TCP_PROTO": "tcp",
    "KVXFER_PORT_5700_TCP_PORT": "5700",
    "KVXFER_PORT_5700_TCP_ADDR": "10.0.0.1",
    "KVXFER_PREFILL_0_SERVICE_HOST": "fd00::1",
    "KVXFER_PREFILL_0_SERVICE_PORT": "53",
    "KVXFER_PREFILL_0_SERVICE_PORT_DNS_UDP": "53",
    "KVXFER_PREFILL_0_PORT": "udp://[fd00::1]:53",
    "KVXFER_PREFILL_0_PORT_53_UDP": "udp://[fd00::1]:53",
    "KVXFER_PREFILL_0_PORT_53_UDP_PROTO": "udp",
    "KVXFER_PREFILL_0_PORT_53_UDP_PORT": "53",
    "KVXFER_PREFILL_0_PORT_53_UDP_ADDR": "fd00::1",
    "KVXFER_DATA_PORT": "tcp://10.0.0.1:5800",
    "KVXFER_S_PORT": "sctp://10.0.0.1:1",
    "KVXFER_S_PORT_1_SCTP": "sctp://10.0.0.1:1",
}


def test_what_kubernetes_sets_for_a_service_of_our_name_is_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = load_config({}, {}, SERVICES)
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert load_config({}, {}, SERVICES | {"KVXFER_PORT": "5800"}).config.port == 5800
    ours = load_config({}, {}, SERVICES | {"KVXFER_DATA_PORT": "5800+rank"}).config
    assert ours.data_port == "5800+rank"
    assert load_config({}, {}, SERVICES | {"KVXFER_HOST": "10.0.0.9"}).config.host == "10.0.0.9"
    assert caplog.records == []


@pytest.mark.parametrize("text", ["tcp:5700", "http://10.0.0.1:5700", "10.0.0.1:5700"])
def test_a_port_that_is_neither_ours_nor_a_service_s_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"port: expected 0 .* got .* \(environment\)"):
        load(environ={"KVXFER_PORT": text})


def test_a_config_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="keep_s"):
        Config(keep_s=60)


def test_secrets_are_never_shown() -> None:
    environ = {"KVXFER_CURVE_SECRET_KEY": SECRET, "KVXFER_PARAMS_KEY": SECRET, "KVXFER_PORT": "1"}
    loaded = load_config({"curve_public_key": KEY}, {}, environ)
    assert list(loaded.origins) == list(DEFAULTS)
    for name, value, origin in (
        ("curve_public_key", repr(KEY), "argument"),
        ("curve_secret_key", "'(set)'", "environment"),
        ("params_key", "'(set)'", "environment"),
        ("port", "1", "environment"),
        ("lease_s", "30.0", "default"),
    ):
        assert loaded.origins[name] == origin
        assert f"{name}={value}" in repr(loaded.config)
    texts = [
        repr(loaded),
        str(loaded.config),
        repr(loaded.config.__rich_repr__()),
        str(loaded.origins),
    ]
    for wrong in (
        {"curve_secret_key": SECRET[1:]},
        {"lease_s": "x"},
        {"curve_secret_key": [SECRET]},
        {"params_key": [SECRET]},
    ):
        values = {"curve_public_key": KEY, "curve_secret_key": SECRET} | wrong
        with pytest.raises(ConfigError) as refused:
            load(values)
        texts += [str(refused.value), repr(refused.value.__cause__)]
    assert not any(SECRET[1:] in text for text in texts)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.1.2.3", False),
        ("10.255.0.1", False),
        ("172.31.0.1", False),
        ("192.168.1.1", False),
        ("fd00::7", False),
        ("2001:db8::1", False),
        ("0.0.0.0", False),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("localhost.example", False),
        ("decode-0", False),
        ("127.1", False),
        ("2130706433", False),
        ("", False),
    ],
)
def test_peers_by_default(host: str, allowed: bool) -> None:
    assert Config().peer_allowed(host) is allowed


def test_peers_by_choice() -> None:
    config = Config(allowed_peers=("Decode-0", "8.8.8.8", "2001:db8::/32"))
    assert config.peer_allowed("decode-0")
    assert config.peer_allowed("8.8.8.8")
    assert config.peer_allowed("2001:db8::5")
    assert not config.peer_allowed("127.0.0.1")
    assert not config.peer_allowed("localhost")
    assert not Config(allowed_peers=()).peer_allowed("127.0.0.1")


@pytest.mark.parametrize("own", ["10.1.2.3", "fd00::7"])
def test_this_host_is_also_where_this_engine_listens(own: str) -> None:
    config = Config(host=own)
    assert config.peer_allowed(own)
    assert config.peer_allowed("127.0.0.1")
    assert not config.peer_allowed("10.1.2.4")
    assert not config.peer_allowed("fd00::8")
    assert not Config(host=own, allowed_peers=("8.8.8.8",)).peer_allowed(own)


def test_only_what_somebody_has_named_is_named() -> None:
    assert not Config().peer_named("127.0.0.1")
    assert not Config(host="10.1.2.3").peer_named("10.1.2.3")
    config = Config(allowed_peers=("127.0.0.0/8", "decode-0"))
    assert config.peer_named("127.0.0.1")
    assert config.peer_named("decode-0")
    assert not config.peer_named("localhost")


@given(st.integers(min_value=0, max_value=2**32 - 1))
def test_ipv4_addresses_by_hand(number: int) -> None:
    a, b, c, d = number.to_bytes(4, "big")
    assert Config().peer_allowed(f"{a}.{b}.{c}.{d}") is (a == 127)


@given(st.text(max_size=50), st.sampled_from(sorted(DEFAULTS)))
def test_any_text_is_a_value_or_a_named_error(text: str, name: str) -> None:
    try:
        load(environ={f"KVXFER_{name.upper()}": text})
    except ConfigError as refused:
        assert "expected" in str(refused)  # noqa: PT017
        assert "curve" in str(refused) if name.startswith("curve") else name in str(refused)  # noqa: PT017


def test_other_libraries_variables_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_SET", "user")
    monkeypatch.setenv("OTHER_REMOVED", "1")
    with variables_kept("OTHER_", OTHER_SET="default", OTHER_NEW="default"):
        assert variables_of("OTHER_")["OTHER_SET"] == "user"
        assert os.environ["OTHER_NEW"] == "default"
        os.environ["OTHER_SET"] = os.environ["OTHER_MORE"] = "the library's"
        del os.environ["OTHER_REMOVED"]
    assert variables_of("OTHER_") == {"OTHER_SET": "user", "OTHER_REMOVED": "1"}


def test_what_holds_for_one_thread_is_no_setting_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does a look fail because a variable goes meanwhile."""
    monkeypatch.setenv("OTHER_SET", "user")
    seen: list[dict[str, str]] = []

    def look() -> None:
        for _ in range(2000):
            seen.append(variables_of("OTHER_"))

    looking = threading.Thread(target=look)
    looking.start()
    while looking.is_alive():
        with variables_kept("OTHER_", OTHER_NEW="default"):
            time.sleep(0)  # the other thread may run here
    looking.join()
    assert len(seen) == 2000
    assert all(each == {"OTHER_SET": "user"} for each in seen)


def test_the_longest_lease_can_be_said() -> None:
    keep = Keep((), b"i", load({"lease_s": 86_400, "max_hold_s": 90_000}, {}).lease_s)
    assert decode_to_source(encode(keep)) == keep
