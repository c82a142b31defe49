"""A child process that ends is named with its last words, and one that does not end is killed."""

import sys

import pytest

from prfaas.errors import PeerError
from prfaas.processes import ChildProcess

from ..waiting import eventually

pytestmark = pytest.mark.system


def test_a_process_that_dies_is_named_with_its_last_words(tmp_path):
    program = "import sys; print('step 1'); sys.exit('the model is damaged')"
    child = ChildProcess("the worker", [sys.executable, "-c", program], tmp_path / "worker.log")
    with pytest.raises(PeerError, match=r"the worker ended with status 1; (.|\n)*the model is damaged"):
        eventually(child.check_running, "the process ends")
    child.stop(60)


def test_a_process_that_does_not_end_is_killed(tmp_path):
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    log = tmp_path / "worker.log"
    child = ChildProcess("the worker", [sys.executable, "-c", program], log)
    eventually(lambda: "deaf" in log.read_text(), "the process ignores SIGTERM")
    child.stop(0.1)
    with pytest.raises(PeerError, match="killed by signal 9"):
        child.check_running()
