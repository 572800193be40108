"""Settings: one frozen record, read once. The one place in kvxfer that reads the environment.

A value comes from the first of: arguments, the engine's extra config, ``KVXFER_<NAME>``, the
default. :func:`load_config` also says which one it was, so that an operator can see why a setting
has its value.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, Final, Literal, get_args

import msgspec

from kvxfer.errors import ConfigError
from kvxfer.ports import Ports, parse_ports

OWN_TRANSPORTS: Final = ("auto", "zmq", "tcp", "shm", "cuda_ipc", "ucx", "nixl")
WIRE_GROUP: Final = "kvxfer.wires"
"""The group of entry points by which other packages add wires."""
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
VerifyKV = Literal["off", "sample", "all"]
Origin = Literal["argument", "engine", "environment", "default"]

log = logging.getLogger("kvxfer.config")

_environment_lock = threading.RLock()
ENV_PREFIX: Final = "KVXFER_"
_FRONT_DOOR_PORT: Final = 5700
# What Kubernetes sets in every pod for a Service named kvxfer or kvxfer-*: <SERVICE>_PORT with a
# URL, and these names with <SERVICE> before them. The rest are the ports and their parts.
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")
_SERVICE_NAME = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_PORTS: Final = ("port", "data_port")
_MIN_PARAMS_KEY: Final = 16
SECRETS: Final = ("curve_secret_key", "params_key")
"""Never shown."""
# A CURVE key is 32 bytes; ZeroMQ writes them as 40 characters of Z85.
_Z85_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
# At least one letter: 127.1 and 2130706433 are addresses to some resolvers, and no names to us.
_HOST_NAME = re.compile(r"(?=[^a-zA-Z]*[a-zA-Z])[a-zA-Z0-9_]([a-zA-Z0-9_.\-]*[a-zA-Z0-9_])?\.?")
_POSITIVE: Final = (
    *("lease_s", "keep_s", "max_hold_s", "pull_timeout_s", "peer_silent_s", "connect_timeout_s"),
    *("drain_timeout_s", "early_wait_s"),
    *("control_max_nbytes", "launch_programs", "min_gbps"),
)
_BOUNDS: Final = {  # name: (least, most, what or why)
    "chunk_nbytes": (4 << 10, 64 << 20, " bytes"),
    "staging_slots": (2, 1024, "; with one slot nothing overlaps"),
    "staging_nbytes": (8 << 10, 4 << 30, " bytes"),
    "lease_s": (0, 86_400, " s, as a message may say it"),
    "load_in_step_s": (0, 1, " s"),
    "early_share": (0, 1, ""),
    "early_ahead": (0, 1, ""),
    "zmq_streams": (0, 16, "; 0 is by the number of cores"),
}
# (shorter, longer, why)
_ORDERED: Final = (
    ("keep_s", "lease_s", "a lease must outlive the wait for the message that extends it"),
    ("lease_s", "max_hold_s", "max_hold_s caps what a lease can be extended to"),
)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting. Durations end in ``_s`` (seconds), sizes in ``_nbytes``.

    A field's text ends with when to change it; the table in docs/operations.md is made of it.

    Raises ConfigError for a value that cannot work, naming field, expected and got.
    """

    transport: str = "auto"
    """The wire, kvxfer's own or another package's. ``auto`` tries candidates with real bytes; any
    other choice works or is an error. Change it to insist on one wire."""
    host: str = "127.0.0.1"
    """The name or address of this machine where the engine listens. Change it for peers on other
    hosts: the address by which they reach this one."""
    port: int | str | None = None
    """Where control messages come in: a port, 0 for any free one, a range (``5700-5710``), or
    ``5700+rank``. Not set: 5700, and a free one for an engine that only takes KV. Change it for a
    second engine on a host, and to ``5700+rank`` or a range for a firewall."""
    data_port: int | str = 0
    """Where stream wires come in, in the same forms: one port each, two for ``tcp``. Change it
    where a firewall or a pod has to name the ports."""
    allowed_peers: tuple[str, ...] | None = None
    """Names, addresses and ranges of the hosts that this engine takes KV from and serves. Not set:
    this host only, and of its sources those of the same user. See :meth:`peer_allowed`. Change it,
    on both sides, for peers on other hosts."""
    trust_network: bool = False
    """Whether only trusted hosts reach this one. ``ucx`` and ``nixl`` take what they are sent
    unchecked: without it they connect processes of one user on one host only. Change it for
    ``ucx`` and ``nixl`` between hosts, on a network without other tenants."""
    lease_s: float = 30.0
    """How long an offer is kept without a word from its sink, a day at most. Change it where
    requests wait longer than this between prefill and decode."""
    keep_s: float = 5.0
    """How often the sink extends the leases of the requests it still wants. Change it with
    ``lease_s``, and to have the blocks of a dead decode engine back sooner."""
    max_hold_s: float = 480.0
    """The longest that an offer is kept, however often it is extended. Change it where requests
    wait longer at the decode side, or must not hold blocks so long."""
    pull_timeout_s: float = 10.0
    """A load that gets no further for this long has failed; a stream that brings nothing to anybody
    for this long is cut. Change it where a wire stands still for longer and goes on."""
    grow_offers: bool = True
    """Whether KV can be read while its prompt is still being computed, step by step. Off: an offer
    opens once, when it is complete. Change it to measure."""
    early_wait_s: float = 30.0
    """How long a request that a router sent to both engines at once waits for its prefill: to
    begin, at either side, and then for each next step. Change it where prompts wait longer in the
    queue of prefill, or blocks must come back sooner."""
    early_share: float = 0.5
    """The part of this engine's blocks, 0 to 1, that requests may hold whose prompt is still being
    computed elsewhere. 0: they wait until it is complete. Change it to a smaller one where decode
    runs out of blocks."""
    early_ahead: float = 0.25
    """The part of this engine's blocks, 0 to 1 and within ``early_share``, that requests may hold
    whose prefill has not been heard of yet: what it has in its cache comes a trip of the network
    sooner or two. 0: they hold none before. Change it to a smaller one where decode runs out of
    blocks and prompts wait long in the queue of prefill."""
    load_in_step_s: float | None = None
    """Loads that together take no longer, by the trials of their wires, are part of the step that
    orders them: it computes behind their copies, and other requests wait as long. Where none runs
    it is 10 ms, or this if that is more. Not set: a third of a decode step, as the last ones were.
    The end of a load that takes little longer is waited for as long, in the step in which it
    begins. 0: neither. Change it to have first tokens sooner, or others more even."""
    peer_silent_s: float = 3.0
    """A peer that owes an answer and says nothing for this long is down. Change it where engines
    stand still for longer, or must be found dead sooner."""
    connect_timeout_s: float = 5.0
    """First contact with a peer ends after this long. Change it where the trials of the wires take
    longer."""
    drain_timeout_s: float = 60.0
    """How long an engine that was told to end serves what is open. Change it where requests run
    longer, or something else ends the process sooner."""
    chunk_nbytes: int | None = None
    """Payload of each message of a stream, 4 KiB to 64 MiB. Not set: for each transfer what its
    wire's measured costs make best. Change it to measure."""
    staging_slots: int | None = None
    """Chunks in flight on one connection of a stream, 2 or more. Not set: by its measured costs.
    Change it to measure."""
    staging_nbytes: int | None = None
    """The most staging of one connection, on each side. Not set: 32 MiB where it is host memory
    (for each stream of ``zmq`` and ``tcp``), 256 MiB on a GPU, and what the two settings above
    make. Change it where memory is short, or many peers connect."""
    zmq_streams: int = 0
    """Connections over which ``zmq`` or ``tcp`` carries the chunks of one peer rank, each with a
    thread of its own: what the sink says, as far as the source says as much. 0: one for each four
    cores, 1 to 8. Change it where a network needs more of them, or the engine needs the cores."""
    control_max_nbytes: int = 4 << 20
    """A longer control message is refused, answered and counted. Change it for prompts of millions
    of tokens; lower it where peers are not trusted."""
    launch_programs: int = 24
    """Thread blocks of a copy to a GPU from another one, or between it and the host: the most SMs
    that it takes from what else runs there. Chunks within a GPU are copied by all of it. Change it
    to trade the speed of loads for that of decode steps."""
    min_gbps: float | None = None
    """Refuse a peer whose measured wire is slower (GB/s, 1e9 bytes). Change it where a slow wire
    must be an error."""
    hash_seed: str | None = None
    """Root of the block hashes; equal on engines that share a cache. Not set: PYTHONHASHSEED.
    Change it where a prefix cache outside knows blocks by their hashes."""
    curve_public_key: str | None = None
    """This engine's public CURVE key (Z85); with the secret one or not at all. Change it where
    others can read or reach the network."""
    curve_secret_key: str | None = None
    """This engine's secret CURVE key (Z85). Never shown. Change it with the public one."""
    curve_server_keys: dict[str, str] | None = None
    """The public key expected of each engine, by engine id (Z85). Change it with the keys of the
    engines."""
    curve_keys_dir: str | None = None
    """A folder of CURVE keys that all engines share, instead of the three settings above; ``kvxfer
    keys`` makes it. Change it where others can read or reach the network."""
    params_key: str | None = None
    """A secret that all engines share, 16 characters or more: signs ``kv_transfer_params``, and
    unsigned ones are plain. Never shown. Change it where clients of the HTTP server are not
    trusted."""
    bind_tokens: bool = True
    """Compare digests of the token ids on both sides before any KV moves. Change it, on both
    sides, for prompts whose token ids differ by design."""
    allow_cast: bool = False
    """Take and give KV between caches of other types or scales (``float32``, ``bfloat16``,
    ``float16``, ``fp8``): the copy casts it, where both sides allow it. Off: such a peer is
    refused. Change it, on both sides, where one of them keeps KV in ``fp8``."""
    offer_board: bool = True
    """Show open offers to sinks of this host in shared memory, and look at theirs: a direct read
    then waits for no answer. Off: every offer is asked for, and certified, by message. Change it
    to measure."""
    verify: VerifyKV = "off"
    """Compare digests of the KV at both sides after each load: of ``all`` tokens, or of a
    ``sample``, one in 16. Unequal ones fail the load as ``corrupt``. Read by the side that takes
    KV. Change it where memory, links or drivers are in doubt."""
    log_level: LogLevel = "INFO"
    """The lowest level of the lines of the logger ``kvxfer``. Change it to DEBUG to see each load.
    """

    def __post_init__(self) -> None:
        for check in (
            *(_check_numbers, _check_staging, _check_order),
            *(_check_peers, _check_curve, _check_params_key),
        ):
            check(self)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_shown(name, value)}" for name, value in _items(self))
        return f"Config({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, _open(name, value)) for name, value in _items(self)]

    @property
    def hash_seed_bytes(self) -> bytes | None:
        """The seed of the block hashes as UTF-8, or None if nobody chose one."""
        return None if self.hash_seed is None else self.hash_seed.encode()

    def for_engine(self, *, gives_kv: bool, num_ranks: int, replica: int = 0) -> Config:
        """The ports of one replica, whose engine gives KV or only takes it. Raises ConfigError."""
        usual = _FRONT_DOOR_PORT if gives_kv else 0
        port = parse_ports("port", usual if self.port is None else self.port)
        data = self.data_ports
        if data.is_one and num_ranks > 1:
            raise ConfigError(
                f"data_port: expected a port for each of {num_ranks} ranks, got {data}; say "
                f"{data}+rank, or a range"
            )
        port, data = (
            each.moved(replica * (num_ranks if each.adds_rank else 1)) for each in (port, data)
        )
        return msgspec.structs.replace(self, port=port.setting, data_port=data.setting)

    def for_rank(self, rank: int) -> Config:
        """A single ``port`` is rank 0's, which knows the others' ports: they take any free one."""
        port = self.control_ports
        port = parse_ports("port", 0) if port.is_one and rank > 0 else port.of_rank(rank)
        data = self.data_ports.of_rank(rank)
        return msgspec.structs.replace(self, port=port.setting, data_port=data.setting)

    @property
    def control_ports(self) -> Ports:
        return parse_ports("port", self.port or 0)

    @property
    def data_ports(self) -> Ports:
        return parse_ports("data_port", self.data_port)

    def peer_allowed(self, host: str) -> bool:
        """Does ``allowed_peers`` admit this host? If it is not set: this host's loopback, and the
        address that this engine itself listens on.

        An address is compared with addresses and ranges, a name with names (letter case aside).
        Names are never looked up here: who connects by a name that is not listed resolves it first,
        asks about the address, and connects to that.
        """
        if self.allowed_peers is not None:
            return self.peer_named(host)
        address = _address(host)
        if address is None:
            return _plain_name(host) == "localhost"
        return address.is_loopback or address == _address(self.host)

    def peer_named(self, host: str) -> bool:
        """Has somebody set ``allowed_peers`` so that it admits this host?"""
        entries, address = self.allowed_peers or (), _address(host)
        if address is None:
            names = {_plain_name(entry) for entry in entries if _network(entry) is None}
            return _plain_name(host) in names
        networks = (_network(entry) for entry in entries)
        return any(network is not None and address in network for network in networks)


_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(Config)}


class LoadedConfig(msgspec.Struct, frozen=True):
    """A config and, for each of its fields, where the value came from."""

    config: Config
    origins: dict[str, Origin]


def unknown_name(name: str, known: Sequence[str], where: str) -> str:
    why = f"expected a setting of kvxfer, got an unknown name ({where})"
    return f"{name}: {why}; {_did_you_mean(name, known)}"


def _did_you_mean(name: str, known: Sequence[str], prefix: str = "") -> str:
    """``prefix``: of all of them; compared with it, short names would all be near."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known are {', '.join(prefix + each for each in known)}"


def not_admitted(host: str) -> str:
    return (
        f"allowed_peers of this engine does not admit {host}; set it on both sides to the names or "
        "addresses of the other one"
    )


def load_config(
    arguments: Mapping[str, Any],
    extra_config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """The settings of this process; ``environ`` is the process's own unless given.

    Values may be text, as the environment has them: ``allowed_peers`` separated by commas,
    ``curve_server_keys`` as ``ENGINE=KEY`` separated by commas. None, or an empty variable, means
    not set. A ``KVXFER_`` variable of another name is a warning, unless Kubernetes made it for a
    Service of our name.

    Raises ConfigError for unknown names among the arguments and the extra config, and for values
    that cannot work.
    """
    sources: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
        ("argument", arguments),
        ("engine", extra_config or {}),
        ("environment", _from_environment(variables_of("") if environ is None else environ)),
    )
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(Config.__struct_fields__, "default")
    for origin, found in sources:
        for name, value in found.items():
            if name not in Config.__struct_fields__:
                raise ConfigError(unknown_name(name, Config.__struct_fields__, origin))
            if value is not None and name not in values:
                values[name], origins[name] = _from_text(name, value), origin
    _check_one_source_of_keys(values)
    try:
        config = msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as exc:
        raise _explained(exc, values, origins) from exc
    except UnicodeEncodeError:  # its cause would show the text, which may be a secret
        raise ConfigError("settings: expected texts in UTF-8, got other bytes") from None
    except ConfigError as exc:
        origin = origins.get(str(exc).partition(":")[0], "argument")
        raise exc if origin == "argument" else ConfigError(f"{exc} ({origin})") from exc
    _check_transport(config.transport, origins["transport"])
    return LoadedConfig(config, origins)


def variables_of(prefix: str) -> dict[str, str]:
    """Settings of another library, by whole name: kvxfer overrides none of them."""
    with _environment_lock:  # what holds meanwhile for another thread is nobody's setting
        found = {name: os.environ.get(name) for name in list(os.environ) if name.startswith(prefix)}
    return {name: value for name, value in found.items() if value is not None}


@contextmanager
def variables_kept(prefix: str, **defaults: str) -> Iterator[None]:
    """Around a call of a library that sets or reads variables of the whole process: they are as
    before afterwards. ``defaults`` hold meanwhile where nobody has set them. One thread at a time.

    Nothing is written that is so already: C's ``setenv`` moves variables that other threads read.
    """
    with _environment_lock:
        before = variables_of(prefix)
        os.environ.update({n: value for n, value in defaults.items() if n not in before})
        try:
            yield
        finally:
            after = variables_of(prefix)
            for name in after.keys() - before.keys():
                del os.environ[name]
            os.environ.update({n: value for n, value in before.items() if after.get(n) != value})


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        rest = variable.removeprefix(ENV_PREFIX)
        if _is_of_a_service(rest, text):
            continue
        if rest.lower() not in Config.__struct_fields__:
            _warn_of(rest)
            continue
        found[rest.lower()] = text or None
    seed = environ.get("PYTHONHASHSEED", "")
    # "random" is what Python itself does when the variable is not set.
    if seed and seed != "random" and found.get("hash_seed") is None:
        found["hash_seed"] = seed
    return found


def _is_of_a_service(rest: str, text: str) -> bool:
    has_url = re.fullmatch("(.*_)?PORT", rest) and _SERVICE_URL.fullmatch(text)
    return bool(has_url or _SERVICE_NAME.fullmatch(rest))


def _warn_of(rest: str) -> None:
    """Somebody's mistake, or another program's variable: it is heard, and stops nothing."""
    known = [field.upper() for field in Config.__struct_fields__]
    log.warning(
        "%s: no setting of kvxfer, ignored; %s",
        ENV_PREFIX + rest,
        _did_you_mean(rest.upper(), known, ENV_PREFIX),
    )


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _split_keys(text: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    for part in _split(text):
        engine_id, equals, key = part.partition("=")
        if not equals or not engine_id:
            raise ConfigError(f"curve_server_keys: expected ENGINE=KEY,..., got {part!r}")
        keys[engine_id] = key
    return keys


def _from_text(name: str, value: object) -> object:
    """Text of a list or a mapping in parts; the decoder reads all other text."""
    if isinstance(value, str) and name in _PORTS and value.isdecimal():
        return int(value)
    if isinstance(value, str) and name == "allowed_peers":
        return _split(value)
    if isinstance(value, str) and name == "curve_server_keys":
        return _split_keys(value)
    return value


def _items(config: Config) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(config, name)) for name in Config.__struct_fields__)


def _open(name: str, value: object) -> object:
    return "(set)" if name in SECRETS and value is not None else value


def _shown(name: str, value: object) -> str:
    return repr(_open(name, value))


def _explained(
    exc: msgspec.ValidationError, values: Mapping[str, Any], origins: Mapping[str, Origin]
) -> ConfigError:
    """The decoder's sentence in the project's form: field first, then expected and got."""
    reason, _, path = str(exc).rpartition(" - at `$.")
    name = re.split(r"[.\[`]", path, maxsplit=1)[0]
    if name not in values:
        return ConfigError(f"settings: {exc}")
    got = _shown(name, values[name])
    choices = {
        "transport": OWN_TRANSPORTS,
        "log_level": get_args(LogLevel),
        "verify": get_args(VerifyKV),
    }
    if name in choices:
        reason = f"expected one of {', '.join(choices[name])}"
    elif isinstance(_DEFAULTS[name], bool):
        reason = "expected true or false, 1 or 0"
    else:
        reason = reason[:1].lower() + reason[1:].partition(", got")[0].replace(" | null", "")
    return ConfigError(f"{name}: {reason}, got {got} ({origins[name]})")


def _check_transport(name: str, origin: Origin) -> None:
    """Whether kvxfer or a package that is installed has the wire; it is not imported here."""
    if name in OWN_TRANSPORTS:
        return
    known = (*OWN_TRANSPORTS, *sorted(entry_points(group=WIRE_GROUP).names))
    if name not in known:
        raise ConfigError(f"transport: expected one of {', '.join(known)}, got {name!r} ({origin})")


def _check_numbers(config: Config) -> None:
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name}: expected a finite number above 0, got {value}")
    for name, (least, most, why) in _BOUNDS.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{name}: expected {least} to {most}{why}, got {value}")
    for name in _PORTS:
        parse_ports(name, getattr(config, name) or 0)
    if not config.host:
        raise ConfigError("host: expected a name or an address to listen on, got ''")


def _check_staging(config: Config) -> None:
    chunk_nbytes, num_slots = (
        getattr(config, name) or _BOUNDS[name][0] for name in ("chunk_nbytes", "staging_slots")
    )
    most_nbytes = config.staging_nbytes
    if most_nbytes is not None and num_slots * chunk_nbytes > most_nbytes:
        raise ConfigError(
            f"staging_nbytes: expected room for {num_slots} chunks (staging_slots) of "
            f"{chunk_nbytes} bytes (chunk_nbytes), got {most_nbytes}"
        )


def _check_order(config: Config) -> None:
    for shorter, longer, why in _ORDERED:
        small, large = getattr(config, shorter), getattr(config, longer)
        if small < large:
            continue
        name, relation, other, got, bound = shorter, "less", longer, small, large
        if small == _DEFAULTS[shorter]:  # whoever is to mend it has set the other one
            name, relation, other, got, bound = longer, "more", shorter, large, small
        raise ConfigError(f"{name}: expected {relation} than {other} ({bound}), got {got}; {why}")


def _check_peers(config: Config) -> None:
    for entry in config.allowed_peers or ():
        if _network(entry) is None and not _HOST_NAME.fullmatch(entry):
            raise ConfigError(
                f"allowed_peers: expected names, addresses and ranges, got {entry!r}; "
                "a range has no bits set after its prefix, as in 10.0.0.0/8"
            )


def _check_curve(config: Config) -> None:
    if (config.curve_public_key is None) != (config.curve_secret_key is None):
        missing = "public" if config.curve_public_key is None else "secret"
        raise ConfigError(
            f"curve_{missing}_key: expected one beside the other key, got none; set both or neither"
        )
    if config.curve_server_keys and config.curve_public_key is None:
        raise ConfigError(
            "curve_server_keys: expected this engine's own key pair beside them, got none; "
            "set curve_public_key and curve_secret_key"
        )
    if config.transport == "tcp" and (config.curve_public_key or config.curve_keys_dir):
        raise ConfigError(
            "transport: expected a wire that CURVE keys encrypt, got tcp, whose payloads travel in "
            "clear; say zmq, which has several streams too (zmq_streams), or auto"
        )
    keys = {
        "curve_public_key": config.curve_public_key,
        "curve_secret_key": config.curve_secret_key,
    }
    for engine_id, server_key in (config.curve_server_keys or {}).items():
        keys[f"curve_server_keys[{engine_id!r}]"] = server_key
    for name, key in keys.items():
        if key is not None and not _Z85_KEY.fullmatch(key):
            # the value stays out of the message: it may be the secret one
            raise ConfigError(
                f"{name}: expected 40 characters of Z85, got {len(key)} characters; "
                "zmq.curve_keypair() makes a pair, kvxfer keys make a folder of them"
            )


def _check_one_source_of_keys(values: Mapping[str, Any]) -> None:
    """Of what was set; an engine that has started has the pair of its folder, too."""
    others = [name for name in values if name.startswith("curve_") and name != "curve_keys_dir"]
    if others and "curve_keys_dir" in values:
        raise ConfigError(
            f"curve_keys_dir: expected no other keys beside the folder, got {', '.join(others)}; "
            "set one or the other"
        )


def _check_params_key(config: Config) -> None:
    if config.params_key is not None and len(config.params_key) < _MIN_PARAMS_KEY:
        raise ConfigError(
            f"params_key: expected at least {_MIN_PARAMS_KEY} characters, got "
            f"{len(config.params_key)}; take random ones"
        )


def _plain_name(host: str) -> str:
    return host.rstrip(".").lower()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that this text is, or None for a name; IPv4 inside IPv6 counts as IPv4."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry)
    except ValueError:
        return None
