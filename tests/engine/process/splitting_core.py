"""A core process that hands out the first token of one branch of a new request and then crashes."""

from __future__ import annotations

import os
import signal

from quire.engine.process import core_process
from quire.messages.output import EngineCoreOutputs


class SplittingProc(core_process.EngineCoreProc):
    """Crashes only under requests that no other core had before."""

    def _publish(self, news: EngineCoreOutputs) -> None:
        groups = self.core.lives.groups
        forked = {output.request_id for output in news.outputs if output.branch > 0}
        new = {i for i in forked if i in groups and groups[i].request.progress is None}
        if not new:
            super()._publish(news)
            return
        first = [output for output in news.outputs if output.branch == 0]
        super()._publish(EngineCoreOutputs(outputs=first, stepped_at=news.stepped_at))
        os.kill(os.getpid(), signal.SIGSEGV)


if __name__ == "__main__":
    core_process.main(SplittingProc)
