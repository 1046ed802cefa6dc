"""The roll call of processes, by threads: who is missing, who comes late, twice, or again."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import pytest
from test_processes import free_port

from experiments.common.roll_call import RollCallError, roll_call


def call(numbers, num_processes, timeout=20.0, delays=None):
    """What the call says on each of these processes: None, or the error's words."""
    coordinator = f"localhost:{free_port()}"

    def one(number):
        time.sleep((delays or {}).get(number, 0))
        try:
            roll_call(coordinator, num_processes, number, timeout)
        except RollCallError as error:
            return str(error).replace(coordinator, "HERE")

    with concurrent.futures.ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(one, numbers))


@pytest.mark.parametrize("delays", [{}, {0: 1.0}, {3: 1.0}])
def test_all_come(delays):
    assert call([0, 1, 2, 3], 4, delays=delays) == [None] * 4
    assert call([0], 1) == [None]


def test_all_that_came_know_who_did_not():
    assert call([0, 2, 4], 5, 1.0) == ["processes 1, 3 of 5 did not come to HERE."] * 3
    assert call([0, 1], 3, 1.0) == ["process 2 of 3 did not come to HERE."] * 2


def test_no_process_0():
    (found,) = call([2], 3, 1.0)
    assert found.startswith("process 2 did not reach process 0 at HERE: ") and "refused" in found


def test_two_with_one_number():
    message = "two processes with one number came to HERE: process 1."
    assert call([0, 1, 1], 3) == [message] * 3


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RollCallError, match=f"process 0 cannot listen on localhost:{port}: "):
            roll_call(f"localhost:{port}", 2, 0, 1.0)


def test_a_run_that_has_begun():
    """What listens there is JAX then, whose bytes are no text."""
    with socket.create_server(("", 0)) as other:

        def talk():
            with contextlib.suppress(OSError):
                while True:
                    with other.accept()[0] as caller:
                        caller.recv(16)
                        caller.sendall(b"\x00\x00\xff\x80\n")

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(RollCallError, match="process 1 did not reach .* holds no roll call"):
            roll_call(f"localhost:{other.getsockname()[1]}", 2, 1, 1.0)
        other.shutdown(socket.SHUT_RDWR)


def test_strangers_and_processes_that_come_again():
    port = free_port()
    first = threading.Thread(target=roll_call, args=(f"localhost:{port}", 3, 0, 20.0))
    first.start()
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"7\n", b"1\n"):  # the last is killed
        for _ in range(100):
            try:
                with socket.create_connection(("localhost", port), timeout=5) as connection:
                    connection.sendall(sent)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    time.sleep(0.2)
    assert first.is_alive()
    second = threading.Thread(target=roll_call, args=(f"localhost:{port}", 3, 2, 20.0))
    second.start()
    roll_call(f"localhost:{port}", 3, 1, 20.0)
    first.join(5)
    second.join(5)
    assert not first.is_alive() and not second.is_alive()
