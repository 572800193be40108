"""The folder with the CURVE keys that engines share (``curve_keys_dir``), and its rotation.

Each engine takes the current pair when it starts, and accepts every key of the folder. It reads the
folder again at the first handshake after a change. So at every moment of a rotation, and while a
step of it is on its way to the hosts, each engine accepts the key of every other one:

| file | holds | |
|---|---|---|
| ``current.key_secret`` | a pair | taken by engines that start |
| ``next.key_secret`` | a pair | accepted; nobody has it yet |
| ``previous.key`` | a public key | accepted; engines that started earlier have its pair |

Files are certificates of ZeroMQ (``zmq.auth``). Others may not read them; their group may, because
Kubernetes mounts a Secret so.
"""

from __future__ import annotations

import enum
import logging
import os
import struct
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from zmq.auth.certs import load_certificate
from zmq.utils import z85

from kvxfer.config import Config
from kvxfer.errors import ConfigError

CURRENT, NEXT, PREVIOUS = "current.key_secret", "next.key_secret", "previous.key"
_KEY_NBYTES = 32
_FOR_OTHERS = 0o007

_log = logging.getLogger("kvxfer.transports")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """In Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class FolderKeys:
    """What a folder holds. ``previous``: a public key."""

    current: KeyPair
    next: KeyPair | None = None
    previous: str | None = None

    @property
    def accepted(self) -> frozenset[str]:
        """The public keys, in Z85."""
        others = (self.next.public if self.next is not None else None, self.previous)
        return frozenset({self.current.public, *(key for key in others if key is not None)})

    def __str__(self) -> str:
        named = {"current": self.current.public, "previous": self.previous}
        named["next"] = self.next.public if self.next is not None else None
        return ", ".join(f"{short(key)} ({what})" for what, key in named.items() if key is not None)


def short(key: str) -> str:
    """Enough of a public key to know it by."""
    return key[:8]


# ------------------------------------------------------------------ what an engine reads


def read_keys(folder: str | Path) -> FolderKeys:
    """Raises ConfigError for files that are missing, damaged, or readable by every user."""
    current, upcoming, previous = (_read(Path(folder, name)) for name in (CURRENT, NEXT, PREVIOUS))
    if current is None:
        raise ConfigError(
            f"curve_keys_dir: expected {CURRENT} in {folder}, got none; kvxfer keys make {folder} "
            "makes it"
        )
    pairs = [_pair(key) for key in (current, upcoming)]
    assert pairs[0] is not None
    return FolderKeys(pairs[0], pairs[1], None if previous is None else previous[1])


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
    return _ring(folder).keys().accepted


class _Ring:
    """The keys of a folder as this process last read them. For any thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._stamp = _stamp(folder)
        self._keys = read_keys(folder)

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
                self._reload()
            return self._keys

    def _reload(self) -> None:
        try:
            self._keys = read_keys(self._folder)
        except ConfigError as e:
            _log.warning("%s; the keys that were read before stay accepted", e)
            return
        _log.info("curve_keys_dir: %s has changed; accepted: %s", self._folder, self._keys)
        for key in self._taken - self._keys.accepted:
            _log.warning(
                "curve_keys_dir: expected key %s of this engine in %s, got %s; restart this engine",
                *(short(key), self._folder, self._keys),
            )


_rings: dict[str, _Ring] = {}


def _ring(folder: str) -> _Ring:
    ring = _rings.get(folder)
    return ring if ring is not None else _rings.setdefault(folder, _Ring(folder))


def _stamp(folder: str) -> tuple[tuple[int, int, int] | None, ...]:
    """Another one after each change of a file, or of the link to it."""
    stamps: list[tuple[int, int, int] | None] = []
    for name in (CURRENT, NEXT, PREVIOUS):
        try:
            found = Path(folder, name).stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((found.st_ino, found.st_mtime_ns, found.st_mode))
    return tuple(stamps)


def _read(path: Path) -> tuple[Path, str, str | None] | None:
    """The public and the secret key, if any; None where there is no file."""
    try:
        mode = path.stat().st_mode & 0o777
        if mode & _FOR_OTHERS:
            raise ConfigError(
                f"{path}: expected a file for its owner and group only, got mode {mode:04o}; "
                f"say chmod 600 {path}, or defaultMode: 0440 of a Kubernetes Secret"
            )
        public, secret = load_certificate(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: expected a CURVE certificate, got {e}") from e
    if not _is_whole(public, secret):
        # no values: one of them may be the secret one
        raise ConfigError(
            f"{path}: expected a public key, or a pair that belongs together, got a damaged file; "
            "copy it again"
        )
    return path, public.decode(), None if secret is None else secret.decode()


def _is_whole(public: bytes, secret: bytes | None) -> bool:
    try:
        is_key = len(z85.decode(public)) == _KEY_NBYTES
        return is_key and (secret is None or zmq.curve_public(secret) == public)
    except (KeyError, ValueError, struct.error, zmq.ZMQError):
        return False


def _pair(read: tuple[Path, str, str | None] | None) -> KeyPair | None:
    if read is None:
        return None
    path, public, secret = read
    if secret is None:
        raise ConfigError(f"{path}: expected a secret key beside the public one, got none")
    return KeyPair(public, secret)


# ------------------------------------------------------------------ what an operator writes


class Step(enum.StrEnum):
    """The steps of a rotation, in order."""

    ADD = "add"
    USE = "use"
    DROP = "drop"


def next_step(keys: FolderKeys) -> Step:
    """The one that is due. A ``use`` that was cut off has left both files, and is due again."""
    if keys.next is not None:
        return Step.USE
    return Step.ADD if keys.previous is None else Step.DROP


def make_keys(folder: Path) -> FolderKeys:
    """Make the folder, if it is not there, and its first pair. Raises ConfigError if it has keys,
    OSError where it cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = [name for name in (CURRENT, NEXT, PREVIOUS) if (folder / name).exists()]
    if there:
        raise ConfigError(
            f"{folder}: expected a folder without keys, got {', '.join(there)}; "
            f"kvxfer keys rotate {folder} replaces keys step by step"
        )
    _write(folder / CURRENT, *_new_pair())
    return read_keys(folder)


def rotate_keys(folder: Path, step: Step | None) -> FolderKeys:
    """Take one step of a rotation. Raises ConfigError unless it is the one that is due, OSError
    where the folder cannot be written.
    """
    keys = read_keys(folder)
    due = next_step(keys)
    if step is not due:
        raise ConfigError(f"STEP: expected {due}, got {step or 'none'}; {folder} has {keys}")
    match due:
        case Step.ADD:
            _write(folder / NEXT, *_new_pair())
        case Step.USE:
            # In this order there is no moment at which one of both keys is not accepted
            _write(folder / PREVIOUS, keys.current.public)
            (folder / NEXT).replace(folder / CURRENT)
        case Step.DROP:
            (folder / PREVIOUS).unlink()
    return read_keys(folder)


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write(path: Path, public: str, secret: str | None = None) -> None:
    """Nobody sees half of the file, and no other user sees it at all."""
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    lines = ["metadata", f'    made = "{made}"', "curve", f'    public-key = "{public}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret}"')
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write("\n".join(lines) + "\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
