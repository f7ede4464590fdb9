"""Signed manifests, and remote checkpoints that only the owner of a key can read."""

from __future__ import annotations

import fcntl
import io
import json
import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.checkpoint.discovery import bring, find_latest
from headway.checkpoint.format import sealing
from headway.checkpoint.format.manifest import Manifest, tensor_bytes
from headway.checkpoint.format.sealing import CHUNK_BYTES, content_size, seal_bytes, sealed_size, unseal, unseal_bytes
from headway.checkpoint.format.signing import key_to_sign_with, signing_key
from headway.checkpoint.records import RECORDS, RECORDS_FILE, RecordsPacker
from headway.checkpoint.remote.acquire import acquire_tier
from headway.checkpoint.remote.files import sent_name
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.open import place_of
from headway.checkpoint.remote.ownership import read_claim
from headway.checkpoint.remote.relay import Relay, RelayedSave
from headway.checkpoint.remote.tier import RemoteTier, journal_of
from headway.checkpoint.retention import Rules
from headway.checkpoint.run_identity import RunIdentity
from headway.checkpoint.save.parts import CheckpointPart
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.transfer import remote_manifests
from headway.checkpoint.verify_remote import remote_checkpoints
from headway.cli.application import application
from headway.config import RemoteConfig
from headway.core.credentials.secrets import redact
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.hashes import fingerprint
from headway.run.directory.restore import prune
from headway.run.directory.run_directory import RunDirectory
from support.states import equal, make_state, names, save

SECRET, OTHER = "a secret of some length", "another secret of some length"


def ed25519() -> tuple[str, str]:
    """A private and a public key in PEM."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    return private.decode(), key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo).decode()


def problem(store: CheckpointStore, step: int = 1) -> str:
    return "; ".join(map(str, store.verify(step).damage))


@pytest.mark.parametrize("kind", ["hmac-sha256", "ed25519"])
def test_only_who_has_the_key_makes_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    private, public = (SECRET, SECRET) if kind == "hmac-sha256" else ed25519()
    other = OTHER if kind == "hmac-sha256" else ed25519()[1]
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(private)
    monkeypatch.setenv("HEADWAY_SIGNING_KEY_FILE", str(tmp_path / "key"))
    store = CheckpointStore(tmp_path / "run", sign_with=key_to_sign_with())
    first = save(store, 1)
    assert first.context["signature"]["algorithm"] == kind and problem(store) == ""
    monkeypatch.setenv("HEADWAY_SIGNING_KEY", public)
    assert problem(store) == "" and store.newest() is not None
    # Whoever changes something makes all hashes right again, but not the signature.
    path = store.info(1).path / "manifest.json"
    record = json.loads(path.read_text())
    record["context"]["attempt"] = 7
    record.pop("manifest_sha256")
    path.write_text(json.dumps({**record, "manifest_sha256": fingerprint(record)}))
    assert "has a signature that does not belong to it" in problem(store)
    monkeypatch.setenv("HEADWAY_SIGNING_KEY", other)
    save(CheckpointStore(tmp_path / "unsigned"), 1)
    assert "is signed with another key" in problem(store)
    assert "is not signed, and HEADWAY_SIGNING_KEY is set" in problem(CheckpointStore(tmp_path / "unsigned"))
    monkeypatch.delenv("HEADWAY_SIGNING_KEY")
    monkeypatch.delenv("HEADWAY_SIGNING_KEY_FILE")
    assert problem(store) == "" and store.info(1).context["attempt"] == 7, "without a key nobody can tell"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_without_the_key_verify_says_that_the_signature_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("HEADWAY_SIGNING_KEY", SECRET)
    save(CheckpointStore(tmp_path / "signed", sign_with=key_to_sign_with()), 1)
    app = application(["checkpoints"])

    def verify(name: str, *more: str) -> str:
        result = CliRunner().invoke(app, ["checkpoints", "verify", f"{scheme}{tmp_path / name}", *more])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert verify("signed").strip().endswith("signature valid")
    assert json.loads(verify("signed", "--json"))[0]["signature"] == "valid"
    monkeypatch.delenv("HEADWAY_SIGNING_KEY")
    save(CheckpointStore(tmp_path / "unsigned"), 1)
    assert "signature not checked (set HEADWAY_SIGNING_KEY)" in verify("signed")
    assert json.loads(verify("signed", "--json"))[0]["signature"] == "not checked"
    assert "signature" not in verify("unsigned")
    assert json.loads(verify("unsigned", "--json"))[0]["signature"] == "none"


def test_keys_that_cannot_sign_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(ConfigError, match="there is no key"):
        key_to_sign_with()
    for text, what in (
        ("short", "at least 16"),
        (" ", "is empty"),
        ("-----BEGIN PUBLIC KEY-----\nx", "not an Ed25519 key"),
    ):
        monkeypatch.setenv("HEADWAY_SIGNING_KEY", text)
        with pytest.raises(ConfigError, match=what):
            signing_key()
    monkeypatch.setenv("HEADWAY_SIGNING_KEY", ed25519()[1])
    with pytest.raises(ConfigError, match="a public key cannot sign"):
        key_to_sign_with()
    monkeypatch.delenv("HEADWAY_SIGNING_KEY")
    monkeypatch.setenv("HEADWAY_SIGNING_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        signing_key()


def test_a_key_file_that_others_may_use_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As ssh refuses it: one of one's own. A public key is no secret."""
    file = tmp_path / "a key"
    file.write_text(SECRET)
    monkeypatch.setenv("HEADWAY_SIGNING_KEY_FILE", str(file))
    for mode in (0o644, 0o640, 0o602, 0o660):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"permissions {mode:04o} of the key's file let others use it") as refused:
            signing_key()
        assert f"chmod 600 '{file}'" in str(refused.value) and SECRET not in str(refused.value)
    for mode in (0o600, 0o400):
        file.chmod(mode)
        assert signing_key() is not None
    assert redact(f"sent {SECRET} to nobody") == "sent *** to nobody", "it is known from here on"
    # Somebody else's file, as a scheduler mounts it for a group.
    file.chmod(0o640)
    monkeypatch.setattr("os.geteuid", lambda: file.stat().st_uid + 1)
    assert signing_key() is not None
    monkeypatch.undo()
    pytest.importorskip("cryptography")
    monkeypatch.setenv("HEADWAY_SIGNING_KEY_FILE", str(file))
    file.write_text(ed25519()[1])
    file.chmod(0o644)
    assert signing_key() is not None


@pytest.mark.parametrize("size", [0, 1, 5, 10, 15])
def test_what_is_sealed_comes_back_and_nothing_else(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr(sealing, "CHUNK_BYTES", 5)
    key, content = bytes(32), bytes(range(size))
    sealed = seal_bytes(content, key, "a")
    assert len(sealed) == sealed_size(size) and content_size(len(sealed)) == size
    assert unseal_bytes(sealed, key, "a") == content and seal_bytes(content, key, "a") != sealed
    chunk = 5 + 16
    changes = [sealed[:n] for n in range(0, len(sealed), 7)] + [sealed + b"x", sealed + sealed[40:]]
    changes += [sealed[:n] + bytes([sealed[n] ^ 1]) + sealed[n + 1 :] for n in range(len(sealed))]
    changes += [sealed[:-chunk], sealed[:40] + sealed[40 + chunk :], sealed[:40] + sealed[40 + chunk :] + sealed[40:61]]
    for changed in changes:
        if changed != sealed:
            with pytest.raises(CheckpointError, match="cannot be decrypted"):
                unseal_bytes(changed, key, "a")
    for wrong_key, name in ((bytes(31) + b"x", "a"), (key, "b")):
        with pytest.raises(CheckpointError, match="cannot be decrypted"):
            unseal_bytes(sealed, wrong_key, name)


def test_large_files_are_sealed_in_chunks() -> None:
    pytest.importorskip("cryptography")
    largest = 0

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal largest
            largest = max(largest, size or 0)
            return super().read(size)

    content = secrets.token_bytes(3 * CHUNK_BYTES + 7)
    target, back = Watched(), io.BytesIO()
    sealing.seal(Watched(content), target, bytes(32), "a")
    target.seek(0)
    unseal(target, back, bytes(32), "a")
    assert back.getvalue() == content and largest == CHUNK_BYTES + 16


KEY = "cd" * 32


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A run with one encrypted checkpoint, of step 3."""
    pytest.importorskip("cryptography")
    monkeypatch.setattr(sealing, "CHUNK_BYTES", 100)
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", KEY)
    store = CheckpointStore(tmp_path / "tiny" / "checkpoints", max_shard_bytes=150, encrypt_with=bytes.fromhex(KEY))
    save(store, 3)
    return store


def test_a_checkpoint_that_is_encrypted_where_it_lies(sealed: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    info = sealed.info(3)
    assert info.manifest.version == 3 and all(name.endswith(".safetensors.sealed") for name in info.manifest.files)
    assert info.state_sha256 == save(CheckpointStore(sealed.directory.parent / "plain"), 3).state_sha256
    state = make_state(3)
    for path in info.path.glob("shard-*"):
        content = path.read_bytes()
        assert b"model." not in content and tensor_bytes(state["model.embedding"])[:16] not in content
    assert problem(sealed, 3) == "" and sealed.newest() == info and equal(sealed.load(info), state)
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "ef" * 32)
    save(CheckpointStore(sealed.directory), 2)
    for look in (sealed.newest, lambda: prune(RunDirectory(sealed.directory.parent), Rules(keep=1))):
        with pytest.raises(ConfigError, match="it is encrypted with a key other than"):  # nothing older is gone on from
            look()
    assert [folder.name for folder in sealed.folders()] == ["step-00000002", "step-00000003"]
    monkeypatch.delenv("HEADWAY_ENCRYPTION_KEY")
    with pytest.raises(ConfigError, match="it is encrypted, and there is no key"):
        sealed.newest()


def test_damage_to_an_encrypted_checkpoint_names_the_tensors(sealed: CheckpointStore) -> None:
    """The first file holds more than one tensor, in several chunks; its last one is changed."""
    name = sorted(sealed.info(3).manifest.files)[0]
    path = sealed.info(3).path / name
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    (damage,) = sealed.verify(3).damage
    held = {tensor for tensor, _ in sealed.info(3).manifest.slices_of(name)}
    assert damage.file == name and "has changed since it was written" in damage.what
    assert set(damage.tensors) and set(damage.tensors) < held


def test_a_manifest_of_version_2_names_no_encrypted_files(sealed: CheckpointStore) -> None:
    record = json.loads((sealed.info(3).path / "manifest.json").read_text()) | {"version": 2}
    record.pop("manifest_sha256")
    with pytest.raises(ValueError, match="a file is encrypted, which version 2 does not have"):
        Manifest.parse(json.dumps({**record, "manifest_sha256": fingerprint(record)}).encode())


@pytest.mark.parametrize("remote_too", [False, True])
def test_what_is_encrypted_here_is_sent_as_it_is(sealed: CheckpointStore, tmp_path: Path, remote_too: bool) -> None:
    run, remote = sealed.directory.parent, {"url": f"file://{tmp_path}/remote", "encrypt": remote_too}
    (tmp_path / "remote").mkdir()
    tier = RemoteTier.find(place_of(remote, "tiny"), run).acquire(run, 1)
    assert tier.publish(sealed.info(3).path, journal_of(run, 3))
    there = tmp_path / "remote" / "tiny" / "run-001" / "step-00000003"
    files = sealed.info(3).manifest.files
    sent = {sent_name(sealed.info(3).manifest, name): sealed.info(3).path / name for name in files}
    assert {path.name for path in there.iterdir()} == {*sent, "manifest.json" + (".sealed" if remote_too else "")}
    assert all((there / name).read_bytes() == path.read_bytes() for name, path in sent.items())
    new = CheckpointStore(tmp_path / "new" / "checkpoints")
    new.directory.mkdir(parents=True)
    found = find_latest(new, lambda: tier)
    assert (
        found is not None and equal(new.load(found), make_state(3)) and names(found.path) == names(sealed.info(3).path)
    )
    tier.discard(3)
    assert not there.exists()


def test_a_remote_checkpoint_that_is_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    run, remote = tmp_path / "tiny", {"url": f"file://{tmp_path}/remote", "encrypt": True}
    (tmp_path / "remote").mkdir()
    with pytest.raises(ConfigError, match="there is no key"):
        place_of(remote, "tiny")
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "zz" * 32)
    with pytest.raises(ConfigError, match="32 bytes in hexadecimal or Base64"):
        place_of(remote, "tiny")
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", secrets.token_hex(32))
    save(CheckpointStore(run / "checkpoints", max_shard_bytes=100), 3)
    tier = RemoteTier.find(place_of(remote, "tiny"), run).acquire(run, 1)
    folder = run / "checkpoints" / "step-00000003"
    assert tier.publish(folder, journal_of(run, 3)) and not tier.publish(folder, journal_of(run, 3))
    there = sorted((tmp_path / "remote" / "tiny" / "run-001" / "step-00000003").iterdir())
    assert all(path.name.endswith(".sealed") for path in there) and len(there) == 4
    assert not any(b"model.embedding" in path.read_bytes() for path in there)
    new = CheckpointStore(tmp_path / "new" / "checkpoints")
    new.directory.mkdir(parents=True)
    found = find_latest(new, lambda: tier)
    assert found is not None and equal(new.load(found), make_state(3))
    assert [f.manifest.step for f in remote_manifests(f"{remote['url']}/tiny")] == [3]
    ended = RemoteTier.find(place_of({**remote, "encrypt": False}, "tiny"), run).acquire(run, 2)
    assert [m.step for m in ended.manifests()] == [3], "with the key it can be read when no more is encrypted"
    save(CheckpointStore(run / "checkpoints", max_shard_bytes=100), 4)
    assert ended.publish(run / "checkpoints" / "step-00000004", journal_of(run, 4))
    assert not any(name.endswith(".sealed") for name in names(tmp_path / "remote/tiny/run-001/step-00000004"))
    third = CheckpointStore(tmp_path / "third" / "checkpoints")
    third.directory.mkdir(parents=True)
    for step in (3, 4):
        manifest = ended.manifest(step)
        assert manifest is not None and equal(third.load(bring(third, ended, manifest)), make_state(step))
    ended.discard(4)
    tier = RemoteTier.find(place_of(remote, "tiny"), run).acquire(run, 3)
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", secrets.token_hex(32))
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "zz")
    assert type(place_of({**remote, "encrypt": False}, "tiny")) is Objects, "what is wrong with it does not matter then"
    monkeypatch.delenv("HEADWAY_ENCRYPTION_KEY")
    with pytest.raises(ConfigError, match="it is encrypted, and there is no key"):
        RemoteTier.find(place_of({**remote, "encrypt": False}, "tiny"), run).manifest(3)
    tier.discard(3)
    assert not (tmp_path / "remote" / "tiny" / "run-001" / "step-00000003").exists()


def test_the_records_of_a_run_and_notes_about_parts_are_encrypted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", KEY)
    run = tmp_path / "tiny"
    tier, remote = sealed_tier(run)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    store = CheckpointStore(run / "checkpoints")
    store.save(1, make_state(1), {"step": 1}, {RECORDS: RecordsPacker(run).pack(run)})
    shutil.move(run / RECORDS_FILE, store.info(1).path)
    assert tier.claim is not None
    relayed = RelayedSave(Relay(run, remote, tier.claim, RunIdentity(run, "0" * 32, "tiny"), 1), 2, 1)
    relayed.send(run, 1, CheckpointPart({}, []))
    relayed.report_failure(1, "no room")
    assert tier.publish(store.info(1).path, journal_of(run, 1))
    sent = names(tmp_path / "remote/tiny/run-001/step-00000001") + names(tmp_path / "remote/tiny/run-001/step-00000002")
    assert len([name for name in sent if RECORDS_FILE in name or "part-" in name or "failed-" in name]) == 3
    assert all(name.endswith(".sealed") for name in sent)
    assert tier.records.fetch(store.info(1).manifest, tmp_path / "records")
    assert (tmp_path / "records").read_bytes() == (store.info(1).path / RECORDS_FILE).read_bytes()
    with pytest.raises(CheckpointError, match="no room"):
        relayed.note(1)
    tier.discard(1)
    assert not (tmp_path / "remote/tiny/run-001/step-00000001").exists()


def sealed_tier(run: Path, *steps: int) -> tuple[RemoteTier, dict[str, Any]]:
    """The remote tier of a run that has sent these steps encrypted, and how it is configured."""
    (run.parent / "remote").mkdir()
    remote = {"url": f"file://{run.parent}/remote", "encrypt": True}
    tier = RemoteTier.find(place_of(remote, "tiny"), run).acquire(run, 1)
    for step in steps:
        save(CheckpointStore(run / "checkpoints", max_shard_bytes=100, keep=9), step)
        assert tier.publish(run / "checkpoints" / f"step-{step:08d}", journal_of(run, step))
    return tier, remote


@pytest.mark.parametrize("key", ["ef" * 32, None])
def test_with_another_key_nothing_remote_is_passed_over_or_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """It looks like damage, for which a run would go back, and send what it has in the place of good checkpoints."""
    pytest.importorskip("cryptography")
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", KEY)
    run = tmp_path / "tiny"
    _, remote = sealed_tier(run, 1, 2, 3)
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    before = {path: path.read_bytes() for path in (tmp_path / "remote").rglob("*") if path.is_file()}
    if key is None:
        monkeypatch.delenv("HEADWAY_ENCRYPTION_KEY")
        remote["encrypt"] = False
    else:
        monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", key)
    why = "it is encrypted, and there is no key" if key is None else "cannot be decrypted with the given key"
    identity = RunIdentity(run, None, run.name)
    tier = RemoteTier(RemoteTier.find(place_of(remote, "tiny"), run).objects, read_claim(run), identity)
    store = CheckpointStore(run / "checkpoints")
    for look in (
        partial(find_latest, store, lambda: tier),
        partial(tier.publish, run / "checkpoints" / "step-00000002", journal_of(run, 2)),
        partial(acquire_tier, RemoteConfig.model_validate(remote), 2, RunIdentity(run, None, run.name)),
        partial(remote_manifests, f"{remote['url']}/tiny"),
        partial(remote_checkpoints, f"{remote['url']}/tiny"),
    ):
        with pytest.raises(ConfigError, match=why):
            look()
    assert {path: path.read_bytes() for path in (tmp_path / "remote").rglob("*") if path.is_file()} == before


def test_where_the_key_fits_what_cannot_be_decrypted_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", KEY)
    run = tmp_path / "tiny"
    tier, remote = sealed_tier(run, 1, 2, 3)
    path = tmp_path / "remote/tiny/run-001/step-00000003/manifest.json.sealed"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    said: list[str] = []
    found = find_latest(CheckpointStore(tmp_path / "new" / "checkpoints"), lambda: tier, said.append)
    assert found is not None and found.step == 2 and "step-00000003: manifest.json cannot be decrypted" in said[0]
    assert acquire_tier(RemoteConfig.model_validate(remote), 2, RunIdentity(run, None, run.name)).publish(
        run / "checkpoints" / "step-00000003", journal_of(run, 3)
    ), "it is replaced"


def test_what_a_kill_has_left_of_a_file_that_was_being_encrypted_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", KEY)
    run = tmp_path / "tiny"
    tier, _ = sealed_tier(run, 1)
    save(CheckpointStore(run / "checkpoints", keep=9), 2)
    held, left = run / "checkpoints" / ".sealing-held", run / "checkpoints" / ".sealing-left"
    left.write_bytes(b"half of it")
    with held.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        tier.publish(run / "checkpoints" / "step-00000002", journal_of(run, 2))
        assert [path.name for path in (run / "checkpoints").glob(".sealing-*")] == [held.name]
