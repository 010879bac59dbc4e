"""Distributed data parallel: one replica a rank, gradients averaged while backward still runs."""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from runner.errors import BadInput
from runner.parallel.launch import STORE_PORT, start_ranks
from runner.parallel.single import Single


class DDP(Single):
    """One replica a rank; gradients are averaged by bucketed all-reduce, overlapped with backward [1].

    Started by torchrun or a scheduler it takes the ranks it finds (RANK, WORLD_SIZE, LOCAL_RANK); started plainly it
    starts ``num_ranks`` on this machine.

    Args:
        num_ranks: ranks on this machine; ``auto`` is settled before launch.
        bucket_cap_mb, static_graph, find_unused_parameters, gradient_as_bucket_view: as torch's
            DistributedDataParallel has them.
        timeout_s: how long a rank waits for the others before it gives up.

    Raises:
        BadInput: more ranks than devices.

    [1] Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, arXiv:2006.15704.
    """

    def __init__(
        self,
        *,
        device: str,
        num_threads: PositiveInt | Literal["auto"],
        num_ranks: PositiveInt | Literal["auto"],
        bucket_cap_mb: PositiveFloat,
        static_graph: bool,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        timeout_s: PositiveFloat,
    ) -> None:
        super().__init__(device=device, num_threads=num_threads)
        self.num_ranks = 1 if num_ranks == "auto" else num_ranks
        self.timeout = timedelta(seconds=timeout_s)
        self.options = {
            "bucket_cap_mb": bucket_cap_mb,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self.is_launched = "RANK" in os.environ
        self.world_size = int(os.environ.get("WORLD_SIZE", str(self.num_ranks)))
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.data_parallel_rank, self.data_parallel_size = self.rank, self.world_size
        if self.device.type != "cpu":
            self._claim_device()

    def _claim_device(self) -> None:
        num_devices = torch.accelerator.device_count()
        needed = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.num_ranks)))
        if needed > num_devices:
            raise BadInput(
                f"parallel.num_ranks={needed}: this machine has {num_devices} {self.device.type} device(s) and each "
                f"rank needs its own; parallel.num_ranks={num_devices} would work"
            )
        self.device = torch.device(self.device.type, self.local_rank)

    def launch(self, work: Callable[..., None], *arguments: Any) -> None:
        """Start the ranks, unless they are there already.

        Raises:
            RankFailed: the first rank that failed, in its own words.
        """
        if self.is_launched:
            work(*arguments)
        else:
            start_ranks(work, arguments, num_ranks=self.num_ranks, timeout=self.timeout)

    def __enter__(self) -> Self:
        super().__enter__()
        backend = dist.get_default_backend_for_device(self.device)
        options: dict[str, Any] = {"timeout": self.timeout}
        if STORE_PORT in os.environ:
            store = dist.TCPStore("127.0.0.1", int(os.environ[STORE_PORT]), is_master=False, timeout=self.timeout)
            options |= {"store": store, "rank": self.rank, "world_size": self.world_size}
        dist.init_process_group(backend, **options)
        return self

    def __exit__(self, *exc_info: object) -> None:
        # After a failure the others may never answer again: leaving the group would wait for them.
        if exc_info[0] is None:
            dist.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """A replica whose gradients are the mean over the ranks; parameters are rank 0's."""
        device_ids = None if self.device.type == "cpu" else [self.device]
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, **self.options)  # type: ignore[arg-type]

    def gradient_sync(self, wrapped: nn.Module, *, enabled: bool) -> AbstractContextManager:
        """All-reduce once a step: the micro-batches before the last only add to the local gradient."""
        return nullcontext() if enabled else wrapped.no_sync()  # type: ignore[operator]

    def agree(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def union(self, names: Iterable[str]) -> set[str]:
        """Names that any rank has."""
        gathered: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(gathered, list(names))
        return {name for names_of_rank in gathered for name in names_of_rank}

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        dist.all_reduce(values)
        return values
