"""Random numbers that belong to a sample: the k-th draw depends on (seed, epoch, index, k) and on nothing else."""

import numpy as np

from runner.errors import BadInput

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_WIDEST_RANGE = 2**32


def splitmix64(states: np.ndarray) -> np.ndarray:
    """The output that splitmix64 gives from each state, uint64 [...]; its next state is ``state + 0x9E3779B97F4A7C15``.

    Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014; constants of Stafford's variant 13.
    """
    mixed = _wrapping_add(states, _GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _wrapping_add(states: np.ndarray, number: int) -> np.ndarray:
    # At least one dimension: numpy warns of overflow in scalars, and wraps arrays in silence, as is wanted here.
    return np.atleast_1d(np.asarray(states, dtype=np.uint64)) + np.uint64(number & _MASK)


class SampleRng:
    """One independent stream a sample, all read side by side.

    Each call of ``uniform``, ``integers`` or ``seeds`` takes the next draw of every sample. Nothing is carried from one
    sample to another, so a batch of N gives what N batches of one give, in any process and in any order.

    Args:
        seed: the run's; its lowest 64 bits count.
        epoch: counted from 0.
        indices: int64 [N], the samples' places in their data set.
    """

    def __init__(self, *, seed: int, epoch: int, indices: np.ndarray) -> None:
        places = np.asarray(indices)
        if places.ndim != 1 or not (np.issubdtype(places.dtype, np.integer) or places.size == 0):
            raise BadInput(f"indices of shape {list(places.shape)} and type {places.dtype}: must be integers [N]")
        run = splitmix64(np.array([seed & _MASK], dtype=np.uint64))
        run_and_epoch = splitmix64(run ^ np.uint64(epoch & _MASK))
        self._streams = splitmix64(run_and_epoch ^ places.astype(np.int64).view(np.uint64))
        self._num_draws = 0

    def __len__(self) -> int:
        return len(self._streams)

    def _next(self) -> np.ndarray:
        states = _wrapping_add(self._streams, self._num_draws * _GOLDEN)
        self._num_draws += 1
        return splitmix64(states)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """float64 [N], low <= x < high, with 53 random bits."""
        return low + (high - low) * ((self._next() >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def integers(self, low: int, high: int) -> np.ndarray:
        """int64 [N], low <= x < high; no value is likelier than another by more than (high - low) / 2**32.

        Raises:
            BadInput: no integer lies in the range, or more than 2**32 do.
        """
        width = int(high) - int(low)
        if not 0 < width <= _WIDEST_RANGE:
            raise BadInput(f"integers({low}, {high}): must hold between 1 and 2**32 integers, high left out")
        scaled = ((self._next() >> np.uint64(32)) * np.uint64(width)) >> np.uint64(32)
        return scaled.astype(np.int64) + int(low)

    def seeds(self) -> np.ndarray:
        """int64 [N], 0 <= x < 2**63: one number a sample, to seed any other generator with (``torch.Generator``)."""
        return (self._next() >> np.uint64(1)).astype(np.int64)
