"""The folder with the CURVE keys that engines share (``curve_keys_dir``), and its rotation.

Each engine takes the current pair when it starts, and accepts every key of the folder. It reads the
folder again at the first handshake after a change. So at every moment of a rotation, and while a
step of it is on its way to the hosts, each engine accepts the key of every other one:

| file | holds | |
|---|---|---|
| ``current.key_secret`` | a pair | taken by engines that start |
| ``next.key_secret`` | a pair | accepted; nobody has it yet (from ``add`` to ``use``) |
| ``previous.key`` | a public key | accepted; engines that started before ``use`` have its pair |

Files are certificates of ZeroMQ (``zmq.auth``). Others may not read them; their group may, because
Kubernetes mounts a Secret so.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from zmq.auth.certs import load_certificate
from zmq.utils import z85

from kvxfer.config import Config
from kvxfer.errors import ConfigError

CURRENT, NEXT, PREVIOUS = _FILES = ("current.key_secret", "next.key_secret", "previous.key")
ADD, USE, DROP = STEPS = ("add", "use", "drop")
"""Of a rotation, in order."""
_KEY_NBYTES = 32
_FOR_OTHERS = 0o007
_DAMAGED = (OSError, LookupError, ValueError, struct.error, zmq.ZMQError)
"""What pyzmq raises for such a file."""

_log = logging.getLogger("kvxfer.transports")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """In Z85. ``secret``: None in ``previous.key``."""

    public: str
    secret: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class FolderKeys:
    """What a folder holds."""

    current: KeyPair
    next: KeyPair | None
    previous: KeyPair | None

    @property
    def accepted(self) -> dict[str, str]:
        pairs = (("previous", self.previous), ("current", self.current), ("next", self.next))
        return {pair.public: what for what, pair in pairs if pair is not None}

    @property
    def due(self) -> str:
        """The next step. A ``use`` that was cut off has left all files, and is due again."""
        if self.next is not None:
            return USE
        return ADD if self.previous is None else DROP

    def __str__(self) -> str:
        return ", ".join(f"{short(key)} ({what})" for key, what in self.accepted.items())


def short(key: str | None) -> str:
    """Enough of a public key to know it by."""
    return (key or "none")[:8]


def read_keys(folder: str | Path) -> FolderKeys:
    """Raises ConfigError for files that are missing, damaged, or readable by every user."""
    current, upcoming, previous = (_read(Path(folder, name)) for name in _FILES)
    if current is None:
        raise ConfigError(
            f"curve_keys_dir: expected {CURRENT} in {folder}, got none; kvxfer keys make {folder} "
            "makes it"
        )
    return FolderKeys(current, upcoming, previous)


def _read(path: Path) -> KeyPair | None:
    try:
        mode = path.stat().st_mode & 0o777
        public, secret = load_certificate(path)
        has_all = path.name == PREVIOUS or zmq.curve_public(secret or b"") == public
        if not has_all or len(z85.decode(public)) != _KEY_NBYTES:
            raise ValueError("keys that do not belong together")  # noqa: TRY301
    except FileNotFoundError:
        return None
    except _DAMAGED as e:
        raise ConfigError(f"{path}: expected a whole CURVE certificate, got {e}") from e
    if mode & _FOR_OTHERS:
        raise ConfigError(
            f"{path}: expected a file for its owner and group only, got mode {mode:04o}; "
            f"say chmod 600 {path}, or defaultMode: 0440 of a Kubernetes Secret"
        )
    return KeyPair(public.decode(), None if secret is None else secret.decode())


# ------------------------------------------------------------------ an engine that runs


def with_folder_keys(config: Config) -> Config:
    """The settings of an engine that starts, with the current pair of its folder if it has one.

    Raises ConfigError.
    """
    if config.curve_keys_dir is None:
        return config
    pair = _ring(config.curve_keys_dir).take()
    return msgspec.structs.replace(
        config, curve_public_key=pair.public, curve_secret_key=pair.secret
    )


def accepted_keys(folder: str) -> frozenset[str]:
    """The public keys of the folder as it is now; as it was last where it cannot be read now."""
    return frozenset(_ring(folder).keys().accepted)


class _Ring:
    """The keys of a folder as this process last read them. For any thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._stamp, self._keys = _stamp(folder), read_keys(folder)

    def take(self) -> KeyPair:
        """The current pair, for an engine that starts. Raises ConfigError."""
        with self._lock:
            self._stamp, self._keys = _stamp(self._folder), read_keys(self._folder)
            self._taken.add(self._keys.current.public)
            return self._keys.current

    def keys(self) -> FolderKeys:
        """Read again if a file has changed, which costs 10 us to find out."""
        with self._lock:
            stamp = _stamp(self._folder)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again()
            return self._keys

    def _read_again(self) -> None:
        try:
            self._keys = read_keys(self._folder)
        except ConfigError as e:
            _log.warning("%s; the keys that were read before stay accepted", e)
            return
        _log.info("curve_keys_dir: %s has changed; accepted: %s", self._folder, self._keys)
        for key in self._taken - self._keys.accepted.keys():
            _log.warning(
                "curve_keys_dir: expected key %s of this engine in %s, got %s; restart this engine",
                *(short(key), self._folder, self._keys),
            )


_rings: dict[str, _Ring] = {}


def _ring(folder: str) -> _Ring:
    return _rings.get(folder) or _rings.setdefault(folder, _Ring(folder))


def _stamp(folder: str) -> list[tuple[int, int, int] | None]:
    """Another one after each change of a file, or of the link to it. Never raises."""
    stamps: list[tuple[int, int, int] | None] = [None] * len(_FILES)
    for index, name in enumerate(_FILES):
        with suppress(OSError):
            found = os.stat(os.path.join(folder, name))
            stamps[index] = (found.st_ino, found.st_mtime_ns, found.st_mode)
    return stamps


# ------------------------------------------------------------------ an operator


def make_keys(folder: Path) -> None:
    """Make the folder, if it is not there, and its first pair. Raises ConfigError if it has keys,
    OSError where it cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if there := [name for name in _FILES if (folder / name).exists()]:
        raise ConfigError(
            f"{folder}: expected a folder without keys, got {', '.join(there)}; "
            f"kvxfer keys rotate {folder} replaces keys step by step"
        )
    _write(folder / CURRENT, *zmq.curve_keypair())


def rotate_keys(folder: Path, step: str | None) -> FolderKeys:
    """Take one step of a rotation. Raises ConfigError unless it is the one that is due, OSError
    where the folder cannot be written.
    """
    keys = read_keys(folder)
    if step != keys.due:
        raise ConfigError(f"STEP: expected {keys.due}, got {step or 'none'}; {folder} has {keys}")
    if step == ADD:
        _write(folder / NEXT, *zmq.curve_keypair())
    elif step == USE:  # in this order: both keys are accepted at every moment
        _write(folder / PREVIOUS, keys.current.public.encode())
        (folder / NEXT).replace(folder / CURRENT)
    else:
        (folder / PREVIOUS).unlink()
    return read_keys(folder)


def _write(path: Path, public: bytes, secret: bytes | None = None) -> None:
    """Nobody sees half of the file, and no other user sees it at all."""
    text = f'metadata\n    made = "{time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}"\n'
    text += f'curve\n    public-key = "{public.decode()}"\n'
    if secret is not None:
        text += f'    secret-key = "{secret.decode()}"\n'
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:  # the disk is full, say: no part of a secret key stays behind
        Path(temporary).unlink(missing_ok=True)
        raise
