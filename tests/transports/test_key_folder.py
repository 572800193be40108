"""The folder of CURVE keys: what is read, what is refused, and that no step of a rotation parts two
engines.
"""

from __future__ import annotations

import errno
import random
import shutil
import stat
from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates, load_certificate

from kvxfer.config import Config, load_config
from kvxfer.connector.access import server_key_of
from kvxfer.errors import ConfigError
from kvxfer.transports.guard import why_refused
from kvxfer.transports.key_folder import (
    ADD,
    CURRENT,
    DROP,
    NEXT,
    PREVIOUS,
    STEPS,
    USE,
    accepted_keys,
    make_keys,
    read_keys,
    rotate_keys,
    short,
    with_folder_keys,
)

STRANGE = zmq.curve_keypair()[0].decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    make_keys(made)
    return made


def started(folder: Path) -> Config:
    """The settings of an engine that starts now."""
    return with_folder_keys(Config(curve_keys_dir=str(folder)))


def secrets_in(folder: Path) -> list[str]:
    return [
        secret.decode()
        for name in (CURRENT, NEXT)
        if (folder / name).exists()
        for secret in load_certificate(folder / name)[1:]
        if secret is not None
    ]


# ------------------------------------------------------------------ the files


def test_files_are_certificates_that_nobody_else_can_read(folder: Path) -> None:
    rotate_keys(folder, ADD)
    (files := list(folder.iterdir())).sort()
    assert [file.name for file in files] == [CURRENT, NEXT]
    rotate_keys(folder, USE)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        public, secret = load_certificate(file)
        assert (secret is None) == (file.name == PREVIOUS)
        assert secret is None or zmq.curve_public(secret) == public
        assert public.decode() in read_keys(folder).accepted


def test_keys_are_not_overwritten(folder: Path) -> None:
    before = (folder / CURRENT).read_bytes()
    with pytest.raises(ConfigError, match="expected a folder without keys, got current.key_secret"):
        make_keys(folder)
    assert (folder / CURRENT).read_bytes() == before


@pytest.mark.parametrize("name", [CURRENT, NEXT, PREVIOUS])
@pytest.mark.parametrize(
    ("mode", "is_refused"),
    [(0o400, False), (0o440, False), (0o600, False), (0o604, True), (0o644, True), (0o602, True)],
)
def test_files_that_every_user_can_read_are_refused(
    folder: Path, name: str, mode: int, is_refused: bool
) -> None:
    rotate_keys(folder, ADD)
    shutil.copy(folder / NEXT, folder / PREVIOUS)
    (folder / name).chmod(mode)
    if not is_refused:
        assert read_keys(folder)
        return
    with pytest.raises(ConfigError, match=rf"{name}: expected a file .*{mode:04o}; say chmod 600"):
        read_keys(folder)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "No public key found"),
        ('public-key = "short"', "expected a whole CURVE certificate, got"),
        (f'public-key = "{"#" * 40}"', "expected a whole CURVE certificate, got"),
        (f'public-key = "{STRANGE}"', "expected a whole CURVE certificate"),
        (
            f'public-key = "{STRANGE}"\nsecret-key = "SECRET"',
            "expected a whole CURVE certificate, got",
        ),
        (
            f'public-key = "{STRANGE}"\nsecret-key = "no\xe9"',
            "expected a whole CURVE certificate, got",
        ),
    ],
    ids=["empty", "short", "no key", "no secret", "another's secret", "no letters"],
)
def test_damaged_files_are_refused_and_not_shown(folder: Path, content: str, why: str) -> None:
    (secret,) = secrets_in(folder)
    (folder / CURRENT).write_text(content.replace("SECRET", secret))
    with pytest.raises(ConfigError, match=why) as refused:
        read_keys(folder)
    assert secret not in str(refused.value)
    assert str(folder / CURRENT) in str(refused.value)


def test_a_folder_without_keys_says_what_makes_them(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=f"curve_keys_dir: .*; kvxfer keys make {folder}"):
            started(folder)


def test_certificates_of_pyzmq_are_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    create_certificates(tmp_path, "current")
    (tmp_path / CURRENT).chmod(0o600)
    public, secret = load_certificate(tmp_path / CURRENT)
    config = started(tmp_path)
    assert (config.curve_public_key, config.curve_secret_key) == (
        public.decode(),
        (secret or b"").decode(),
    )


def test_secrets_are_never_shown(folder: Path) -> None:
    (secret,) = secrets_in(folder)
    for shown in (read_keys(folder), started(folder)):
        assert secret not in f"{shown!r} {shown}"


def test_a_folder_and_single_keys_are_one_too_many(folder: Path) -> None:
    pair = {"curve_public_key": STRANGE, "curve_secret_key": STRANGE}
    for others in (pair, pair | {"curve_server_keys": {"p": STRANGE}}):
        with pytest.raises(ConfigError, match="curve_keys_dir: expected no other keys beside"):
            load_config(others, environ={"KVXFER_CURVE_KEYS_DIR": str(folder)})
    assert load_config({}, environ={"KVXFER_CURVE_KEYS_DIR": str(folder)}).config.curve_keys_dir


# ------------------------------------------------------------------ the steps


def test_steps_come_in_order(folder: Path) -> None:
    for due in (ADD, USE, DROP, ADD):
        keys = read_keys(folder)
        assert keys.due == due
        for step in (None, *STEPS, "more"):
            if step != due:
                with pytest.raises(
                    ConfigError, match=f"STEP: expected {due}, got {step or 'none'}"
                ):
                    rotate_keys(folder, step)
                assert read_keys(folder) == keys
        rotate_keys(folder, due)


def test_a_step_that_was_cut_off_is_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rotate_keys(folder, ADD)
    replace = Path.replace

    def die(path: Path, target: Path) -> Path:
        if path.name == NEXT:
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            rotate_keys(folder, USE)
    assert (folder / PREVIOUS).exists()
    assert read_keys(folder).accepted == before.accepted
    after = rotate_keys(folder, USE)
    assert after.current == before.next
    assert after.previous is not None
    assert after.previous.public == before.current.public


def test_keys_that_cannot_be_written_leave_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "the disk is full")

    before = sorted(folder.iterdir())
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="the disk is full"):
        make_keys(tmp_path / "others")
    assert list((tmp_path / "others").iterdir()) == []
    with pytest.raises(OSError, match="the disk is full"):
        rotate_keys(folder, ADD)
    assert sorted(folder.iterdir()) == before


# ------------------------------------------------------------------ engines that run


def test_a_change_counts_at_the_next_handshake(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = started(folder)
    added = rotate_keys(folder, ADD).next
    assert added is not None
    assert why_refused(config, "10.0.0.9", added.public) is None
    assert f"{folder} has changed; accepted: " in caplog.text
    assert f"{short(added.public)} (next)" in caplog.text
    refusal = why_refused(config, "10.0.0.9", STRANGE)
    assert refusal is not None
    assert f"another ({short(STRANGE)})" in refusal
    assert f"copy {folder} (curve_keys_dir)" in refusal


def test_a_folder_that_cannot_be_read_leaves_the_keys_as_they_were(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = started(folder)
    accepted = accepted_keys(str(folder))
    (folder / CURRENT).rename(folder / "away")
    (folder / NEXT).symlink_to(NEXT)  # which not even stat() can follow
    for _ in range(3):
        assert why_refused(config, "10.0.0.9", config.curve_public_key) is None
        assert accepted_keys(str(folder)) == accepted
    assert caplog.text.count("the keys that were read before stay accepted") == 1
    (folder / NEXT).unlink()
    (folder / "away").rename(folder / CURRENT)
    assert accepted_keys(str(folder)) == accepted


def test_an_engine_whose_key_was_dropped_is_told_to_restart(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = started(folder)
    for step in STEPS:
        rotate_keys(folder, step)
        assert "restart this engine" not in caplog.text
    why_refused(config, "10.0.0.9", STRANGE)
    own = short(config.curve_public_key or "")
    assert f"expected key {own} of this engine in {folder}" in caplog.text
    assert "restart this engine" in caplog.text


def test_a_secret_of_kubernetes_is_such_a_folder(tmp_path: Path) -> None:
    """Links to a folder that is swapped as a whole, files of mode 0440, nothing to write."""
    made, mount = tmp_path / "made", tmp_path / "mount"
    make_keys(made)
    mount.mkdir()

    def sync(version: str) -> None:
        version_dir = mount / f"..{version}"
        shutil.copytree(made, version_dir)
        for file in version_dir.iterdir():
            file.chmod(0o440)
        (mount / "..data_tmp").symlink_to(version_dir.name)
        (mount / "..data_tmp").replace(mount / "..data")
        for name in (CURRENT, NEXT, PREVIOUS):
            link = mount / name
            if (version_dir / name).exists() and not link.is_symlink():
                link.symlink_to(Path("..data", name))
            elif not (version_dir / name).exists():
                link.unlink(missing_ok=True)

    sync("1")
    config = started(mount)
    assert config.curve_public_key == read_keys(made).current.public
    for number, step in enumerate(STEPS, 2):
        keys = rotate_keys(made, step)
        sync(str(number))
        assert accepted_keys(str(mount)) == keys.accepted.keys()
    assert started(mount).curve_public_key != config.curve_public_key


# ------------------------------------------------------------------ a rotation, host by host

HOSTS = range(3)


class Fleet:
    """An operator's folder, hosts with copies of it, an engine on each. Copies arrive, and engines
    start anew, at any time.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = root / "operator"
        make_keys(self.folder)
        self.copies = [root / str(host) for host in HOSTS]
        for copy in self.copies:
            shutil.copytree(self.folder, copy)
        self.engines = [started(copy) for copy in self.copies]

    def move(self, *, follows_recipe: bool) -> str | None:
        """One thing happens; the step, if it was the operator's."""
        host = self.random.choice(HOSTS)
        match self.random.choice(["step", "copy", "restart"]):
            case "copy":
                shutil.rmtree(self.copies[host])
                shutil.copytree(self.folder, self.copies[host])
            case "restart":
                self.engines[host] = started(self.copies[host])
            case _:
                due = read_keys(self.folder).due
                if self.may(due) or not follows_recipe:
                    rotate_keys(self.folder, due)
                    return due
        return None

    def may(self, step: str) -> bool:
        """The recipe: the folder is everywhere; before the drop every engine has the key, too."""
        keys = read_keys(self.folder)
        if any(read_keys(copy) != keys for copy in self.copies):
            return False
        used = {engine.curve_public_key for engine in self.engines}
        return step != DROP or used == {keys.current.public}

    def admits_all(self) -> bool:
        return all(
            server_key_of(sink, "source", source.curve_public_key) == source.curve_public_key
            and why_refused(source, "10.0.0.9", sink.curve_public_key) is None
            for source in self.engines
            for sink in self.engines
        )


@pytest.mark.parametrize("seed", range(2))
def test_no_step_of_a_rotation_parts_two_engines(seed: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, seed)
    steps = []
    for _ in range(250):
        steps.append(fleet.move(follows_recipe=True))
        assert fleet.admits_all(), steps
    assert steps.count(DROP) >= 2


def test_without_the_recipe_it_does(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 0)
    assert not all(fleet.move(follows_recipe=False) or fleet.admits_all() for _ in range(250))
