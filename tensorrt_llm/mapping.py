# SPDX-License-Identifier: Apache-2.0
"""Mapping: how a model is spread over processes. One process is what exists so far."""

from dataclasses import dataclass

from tensorrt_llm._utils import describe_error


@dataclass(frozen=True)
class Mapping:
    """Sizes of the parallel axes and this process's place among them.

    Attributes:
        world_size: Number of processes.
        rank: This process, 0 <= rank < world_size.
        tp_size: Tensor parallelism.
        cfg_size: Guidance branches on different GPUs.
        ulysses_size: Sequence parallelism over heads.
        ring_size: Sequence parallelism over keys.
        parallel_vae_size: GPUs that share the VAE's work.

    Raises:
        NotImplementedError: an axis above 1; the message names it.
        ValueError: a size below 1, or a rank outside ``[0, world_size)``.
    """

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    cfg_size: int = 1
    ulysses_size: int = 1
    ring_size: int = 1
    parallel_vae_size: int = 1

    def __post_init__(self) -> None:
        axes = {name: size for name, size in vars(self).items() if name != "rank"}
        refuse_parallel_axes(axes, where="Mapping")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                describe_error(
                    "rank outside the world",
                    where="Mapping.rank",
                    expected=f"0 <= rank < {self.world_size}",
                    found=self.rank,
                    remedy="leave rank out: the one process that is built has rank 0",
                )
            )


def refuse_parallel_axes(axes: dict[str, int], *, where: str) -> None:
    """Refuse every parallel axis above 1: no axis is built yet.

    Args:
        axes: Size of each axis by its name.
        where: The object that the sizes come from, for the message.

    Raises:
        NotImplementedError: some sizes are above 1; all of them are named.
        ValueError: a size is no integer or below 1.
    """
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(
                describe_error(
                    f"{name} is not a size",
                    where=where,
                    expected="an integer >= 1",
                    found=repr(size),
                    remedy="give the axis 1, the only size that is built",
                )
            )
    above = {name: size for name, size in axes.items() if size > 1}
    if above:
        found = ", ".join(f"{name}={size}" for name, size in above.items())
        raise NotImplementedError(
            describe_error(
                f"Parallelism is not built yet: {', '.join(above)}",
                where=where,
                expected="1 for every axis",
                found=found,
                remedy=(
                    "set each axis named here to 1; for more throughput, start one process per GPU"
                ),
            )
        )
