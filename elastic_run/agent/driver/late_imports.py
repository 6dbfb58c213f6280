"""Modules that only the end or a restart of a job needs, imported when the workers are past their own start.

`pip install` may replace or remove the files of elastic-run while the job runs. Without these imports a job that
succeeded then ended with a traceback, and a failure had no report. They take 2 ms and 0.4 MB. Some flags, such as
--hang-timeout, still import modules later.
"""

import elastic_run.agent.control_requests
import elastic_run.agent.driver.failed_ranks
import elastic_run.agent.driver.round_checks
import elastic_run.core.failure.diagnose
import elastic_run.core.failure.uncaught
import elastic_run.multiprocessing.output.outlet
import elastic_run.multiprocessing.output.remainder
import elastic_run.report.failure
import elastic_run.report.failure_documents  # noqa: F401
