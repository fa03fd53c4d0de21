"""The trainer's side of the shared-memory backend of vLLM's weight-transfer protocol.

Two buffers are mapped by the training ranks and by every worker of every engine for the life of the transfer. While
the engines load one, the ranks fill the other, each copying the shards that it holds to their places: one copy in all.
Rank 0 says when a buffer is free, hears who has written, and is the only one that talks to the engines.

Guaranteed: a sync either ends with every tensor of the manifest loaded exactly once with the right shape, or raises on
both sides within the deadline; a buffer is filled again only after every engine has said that nothing refers to it;
the buffers' files are removed as soon as all have opened them, so that no end of a process leaves one behind.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from dapo_megatron.weights.transport.chunks import WeightSyncError, checksum, chunk_bytes, plan_chunks
from dapo_megatron.weights.transport.clients import EngineClients

SHARED_MEMORY = "shared_memory"
SENDER = 0
BUFFERS = 2


@dataclass
class SharedMemoryTrainerInitInfo(TrainerInitInfo):
    """`buffer_bytes`: see `plan_chunks`. `verify`: see WeightsConfig. `deadline_s`: for the turns of the ranks."""

    backend: ClassVar[str] = SHARED_MEMORY
    buffer_bytes: int
    verify: str
    deadline_s: float


class SharedMemoryTrainerEngine(TrainerWeightTransferEngine[SharedMemoryTrainerInitInfo]):
    """Sends a `WeightSource`. Every rank of the world constructs one and calls `send_weights`.

    A source with `writers` and `write` (MegatronWeightSource) is written by all ranks that hold shards; of any other
    the sender copies what iteration yields.
    """

    init_info_cls = SharedMemoryTrainerInitInfo
    client: EngineClients

    def __init__(self, init_info: SharedMemoryTrainerInitInfo, client: EngineClients, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.verify = init_info.verify
        self.metadata = source.metadata()
        self.chunks = plan_chunks(self.metadata, init_info.buffer_bytes)
        self._rank = init_info.rank
        self._source: Any = source if hasattr(source, "write") else _IteratedSource(source)
        self._writers = [self._source.writers([slot.name for slot in chunk]) for chunk in self.chunks]
        self._ranks = _Ranks(init_info.deadline_s)
        self._buffers: list[torch.Tensor] = []
        self._remote: list[int] = []
        self._filled = 0
        self._first = True

    @classmethod
    def trainer_init(
        cls,
        init_info: SharedMemoryTrainerInitInfo,
        *,
        client: Any,
        source: WeightSource | None = None,
    ) -> Self:
        """Map the buffers on all ranks and in the engines.

        Raises:
            OSError: shared memory has no room for the buffers.
            ValueError: no source; an engine raises it if the manifest does not fit its model.
        """
        if source is None:
            raise ValueError(f"the {SHARED_MEMORY} transport needs a WeightSource")
        engine = cls(init_info, client, source)
        with engine._files() as files:
            engine._map(files)
            if engine.is_sender:
                client.init_weight_transfer_engine({"buffers": files})
        return engine

    def send_weights(self, version: int | None = None) -> None:
        """Push all weights into the engines; `version` becomes their policy version.

        Raises:
            WeightSyncError: the source did not yield exactly what its metadata says, a rank could not write its part,
                or an engine did not answer in time. An error of an engine is raised as it comes from the client. All
                on rank 0; the other ranks return once it has given up, and raise if it is dead or silent.
        """
        with self._source.opened() if isinstance(self._source, _IteratedSource) else contextlib.nullcontext():
            if self.is_sender:
                self._send()
            else:
                self._follow()
        if self.is_sender:
            self.client.finish_weight_update(None if version is None else str(version))
        self._first = False

    def shutdown(self) -> None:
        """Give the buffers back."""
        self._buffers = []

    # ---- the sender ----

    def _send(self) -> None:
        self._filled = 0
        loading = self.client.begin("start_weight_update")
        try:
            for number in range(len(self.chunks)):
                # The engines have loaded chunk number - 2, which lay in this buffer, and may be loading number - 1.
                update_info = self._fill(number)
                loading()
                loading = self.client.begin("update_weights", update_info)
            loading()
            if isinstance(self._source, _IteratedSource):
                self._source.check_end()
        except BaseException:
            self._ranks.dismiss({rank for writers in self._writers[self._filled :] for rank in writers} - {SENDER})
            # Whatever is still being loaded is over before a next sync fills the buffers; it cannot be right any more.
            with contextlib.suppress(Exception):
                loading()
            raise

    def _fill(self, number: int) -> dict[str, Any]:
        """Have all writers write a chunk; its description for the engines."""
        self._filled = number + 1
        chunk, buffer = self.chunks[number], self._buffers[number % BUFFERS]
        writers = [rank for rank in self._writers[number] if rank != SENDER]
        deaf = {rank: why for rank in writers if (why := self._ranks.why_not(self._ranks.tell, rank, True))}
        whole = {slot.name: slot.view(buffer) for slot in chunk}
        try:
            self._source.write(whole)
        finally:
            listening = [rank for rank in writers if rank not in deaf]
            failed = deaf | {rank: why for rank in listening if (why := self._ranks.why_not(self._ranks.hear, rank))}
            self._ranks.gone.update(failed)
        if failed:
            raise WeightSyncError(f"{', '.join(failed.values())}: {chunk[0].name} and what follows it is not written")
        if self._remote:
            self._source.write_received(whole, [rank for rank in writers if rank in self._remote])
        checksums = self.verify == "checksums" or (self.verify == "first" and self._first)
        return {
            "buffer": number % BUFFERS,
            "names": [slot.name for slot in chunk],
            "dtype_names": [str(slot.dtype).removeprefix("torch.") for slot in chunk],
            "shapes": [list(slot.shape) for slot in chunk],
            "offsets_bytes": [slot.offset_bytes for slot in chunk],
            "checksums": [checksum(slot.view(buffer)) for slot in chunk] if checksums else None,
        }

    # ---- every rank ----

    def _follow(self) -> None:
        """Write what this rank holds of each chunk, when told to; end when dismissed."""
        for number, writers in enumerate(self._writers):
            if self._rank not in writers:
                continue
            if not self._ranks.hear(SENDER):
                return
            chunk, written = self.chunks[number], False
            try:
                if self._rank in self._remote:
                    message = self._source.packed([slot.name for slot in chunk])
                else:
                    self._source.write({slot.name: slot.view(self._buffers[number % BUFFERS]) for slot in chunk})
                written = True
            finally:
                self._ranks.tell(SENDER, written)
            if self._rank in self._remote:
                dist.send(message, SENDER)

    @contextlib.contextmanager
    def _files(self) -> Iterator[list[list[Any]]]:
        """[path, size in bytes] of each buffer's file, on every rank; the files are there while the context is open."""
        files: Any = None
        created: list[list[Any]] = []
        try:
            if self.is_sender:
                try:
                    for first in range(min(BUFFERS, len(self.chunks))):
                        size_bytes = max(1, *map(chunk_bytes, self.chunks[first::BUFFERS]))
                        created.append([str(_new_file(size_bytes)), size_bytes])
                    files = created
                except OSError as error:
                    files = error
            files = self._ranks.from_sender(files)
            if isinstance(files, OSError):
                raise files
            yield files
        finally:
            for path, _ in created:
                Path(path).unlink(missing_ok=True)

    def _map(self, files: list[list[Any]]) -> None:
        """Map the buffers where the sender's files are to be found: on its host."""
        found = all(os.path.exists(path) for path, _ in files)
        self._buffers = (
            [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path, size in files] if found else []
        )
        self._remote = [rank for rank, found in enumerate(self._ranks.of_all(found)) if not found]


def _new_file(size_bytes: int) -> Path:
    """A new private file in shared memory.

    Raises:
        OSError: no room; allocated up front, because a later write would kill the process instead.
    """
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    path = Path(folder, f"dapo_megatron_{os.getpid()}_{uuid.uuid4().hex}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, f"no room for a weight buffer of {size_bytes} bytes in {folder}") from error
    finally:
        os.close(descriptor)
    return path


class _Ranks:
    """The few words that the training ranks exchange: whose turn it is, and whether it went well."""

    def __init__(self, deadline_s: float) -> None:
        self.gone: set[int] = set()
        self._group: Any = None
        # Twice: a rank hears of an engine's silence only after the sender has waited for the engine.
        self._deadline_s = 2 * deadline_s
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self._deadline_s))

    def tell(self, rank: int, word: bool) -> bool:
        """True; it raises if the rank is dead or silent, as `hear` does."""
        with self._listens(rank):
            dist.send(torch.tensor([word]), rank, group=self._group)
        return True

    def hear(self, rank: int) -> bool:
        word = torch.tensor([False])
        with self._listens(rank):
            dist.recv(word, rank, group=self._group)
        return bool(word)

    def why_not(self, talk: Callable[..., bool], rank: int, *arguments: Any) -> str:
        """Tell or hear a rank that writes: what is wrong with it, empty if nothing is."""
        try:
            return "" if talk(rank, *arguments) else f"training rank {rank} failed"
        except WeightSyncError as error:
            return str(error)

    @contextlib.contextmanager
    def _listens(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WeightSyncError(
                f"training rank {rank} is dead, or silent for {self._deadline_s:g} s ({str(error).splitlines()[0]})"
            ) from error

    def dismiss(self, ranks: Iterable[int]) -> None:
        """Tell ranks that there will be no further turn; those that have failed wait for none."""
        for rank in set(ranks) - self.gone:
            with contextlib.suppress(WeightSyncError):  # a rank that is dead needs no word
                self.tell(rank, False)
        self.gone.clear()

    def from_sender(self, value: Any) -> Any:
        """The sender's value, on every rank."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, SENDER, group=self._group)
        return values[0]

    def of_all(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values = [value]
        if self._group is not None:
            values *= dist.get_world_size()
            dist.all_gather_object(values, value, group=self._group)
        return values


class _IteratedSource:
    """Any WeightSource: the sender copies what iteration yields; other ranks walk along, as it may hold collectives."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """One pass, walked to its end whatever happens, so that collectives stay aligned."""
        self._pairs = iter(self._source)
        try:
            yield
        finally:
            for _ in self._pairs:
                continue

    def writers(self, names: Collection[str]) -> list[int]:
        return [SENDER]

    def write(self, whole: Mapping[str, torch.Tensor]) -> None:
        for expected, place in whole.items():
            name, tensor = next(self._pairs, ("nothing more", None))
            if name != expected:
                raise WeightSyncError(f"the weight source yields {name!r} where its metadata has {expected!r}")
            if tensor is None or tensor.shape != place.shape or tensor.dtype != place.dtype:
                given = None if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise WeightSyncError(
                    f"{name}: expected {tuple(place.shape)} {place.dtype}, the weight source yields {given}"
                )
            place.copy_(tensor.detach())

    def check_end(self) -> None:
        surplus = next(self._pairs, None)
        if surplus is not None:
            raise WeightSyncError(f"the weight source yields {surplus[0]!r} beyond its metadata")
