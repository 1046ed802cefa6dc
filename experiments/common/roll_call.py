"""Roll call of the processes of a run, before JAX connects them: who is missing is known by name.

Process 0 listens on the coordinator's port, the others send it their numbers, and when all are
there it tells them so and leaves the port to JAX. JAX's own start ends without saying who did not
come.
"""

import contextlib
import selectors
import socket
import time

_ALL_HERE = "all here"
_ANSWER = "roll call: "  # what comes before an outcome, to know it from what others say


class RollCallError(RuntimeError):
    """Not all processes came in time, or one came twice."""


def roll_call(coordinator: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Wait until all processes of the run have called this.

    Args:
        coordinator: `host:port` of process 0, where this listens there until all have come.
        num_processes: of the run.
        process_id: of this process.
        timeout: seconds to wait.

    Raises:
        RollCallError: naming the processes that did not come, on all that did; elsewhere than on
            process 0 also if that cannot be reached, with the reason.
    """
    if num_processes == 1:
        return
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    if process_id == 0:
        _call(coordinator, int(port), num_processes, deadline)
    else:
        _answer((host.strip("[]"), int(port)), coordinator, process_id, deadline)


def _call(coordinator: str, port: int, num_processes: int, deadline: float) -> None:
    """Process 0: collect the numbers of the others, and tell them the outcome."""
    here: dict[socket.socket, int] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        try:
            server = stack.enter_context(_listen(port))
        except OSError as error:
            raise RollCallError(f"process 0 cannot listen on {coordinator}: {error}.") from error
        selector.register(server, selectors.EVENT_READ)
        outcome = ""
        while not outcome:
            missing = sorted(set(range(1, num_processes)) - set(here.values()))
            if not missing:
                outcome = _ALL_HERE
            elif len(here) + len(missing) >= num_processes:
                outcome = f"two processes with one number came to {coordinator}: {_double(here)}."
            elif (left := deadline - time.monotonic()) <= 0:
                outcome = f"{_named(missing)} of {num_processes} did not come to {coordinator}."
            else:
                for key, _ in selector.select(left):
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is server:
                        caller = stack.enter_context(server.accept()[0])
                        selector.register(caller, selectors.EVENT_READ)
                    elif (number := _number(ready)) in range(1, num_processes):
                        here[ready] = number
                    else:  # it ended, or it is none of the run
                        here.pop(ready, None)
                        selector.unregister(ready)
        for caller in here:
            with contextlib.suppress(OSError):
                caller.sendall(f"{_ANSWER}{outcome}\n".encode())
    if outcome != _ALL_HERE:
        raise RollCallError(outcome)


def _answer(address: tuple[str, int], coordinator: str, number: int, deadline: float) -> None:
    """Another process: tell process 0 that this one is here, and wait for the outcome."""
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(f"{number}\n".encode())
                # process 0 may have begun to wait a little later
                connection.settimeout(left + 10)
                answer = connection.makefile(errors="replace").readline().strip()
        except OSError as error:
            reason = str(error)
        else:
            if answer == _ANSWER + _ALL_HERE:
                return
            if answer.startswith(_ANSWER):
                raise RollCallError(answer.removeprefix(_ANSWER))
            reason = "what answers there holds no roll call; the others may have begun without it"
        time.sleep(0.2)
    raise RollCallError(f"process {number} did not reach process 0 at {coordinator}: {reason}.")


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _number(caller: socket.socket) -> int:
    """What it sent; 0, which is no caller's, if that is no number or the end."""
    try:
        return int(caller.recv(16))
    except (OSError, ValueError):
        return 0


def _double(here: dict[socket.socket, int]) -> str:
    numbers = list(here.values())
    return _named(sorted({number for number in numbers if numbers.count(number) > 1}))


def _named(numbers: list[int]) -> str:
    return ("process " if len(numbers) == 1 else "processes ") + ", ".join(map(str, numbers))
