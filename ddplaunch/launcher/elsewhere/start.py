"""From a job on several hosts, real or simulated, to an order for each of them, and to the dispatcher behind the front.

Orders go through the pipes to the hosts, not onto their command lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from ddplaunch.launcher.elsewhere import dispatcher
from ddplaunch.launcher.elsewhere.lead import LeadJob, inputs_of_lead
from ddplaunch.launcher.node.signals import passed_on
from ddplaunch.plan.cluster import Allocation
from ddplaunch.plan.cluster.endpoints import job_name
from ddplaunch.reach.agents import agents
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.connections import RemoteJob
from ddplaunch.record.run_folder import run_id_with_nodes
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options import token as secret
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.linux import raise_open_files


def run_over_ssh(
    spec: JobSpec, env: Mapping[str, str], allocation: Allocation, *, serve: Callable[..., int], reports_to_caller: bool
) -> int:
    """Start an agent on each host, show their output until all have ended, and return the exit status of the job.

    `serve` and `reports_to_caller` are those of `launcher.start.node.run`.

    Raises LaunchError: nothing was started.
    """
    if asked := spec.wants_terminal:
        raise LaunchError(
            f"{asked}: a worker on another node cannot have this terminal",
            hint="debug it in a job of one node, on that host; or start ddplaunch on each node yourself, with --node-rank",
        )
    python, token = spec.remote_python or sys.executable, os.urandom(32).hex()
    signals, run_id = passed_on(spec.signals), run_id_with_nodes(spec, env)
    hosts = RemoteJob(
        spec=spec,
        agents=agents(spec, env, allocation, python, run_id, token=token),
        run_id=run_id,
        starter=allocation.starter,
        python=python,
        min_nodes=allocation.nnodes[0],
        env=secret.public(env),
        open_files=raise_open_files(),
    )
    inputs = inputs_of_lead(spec, env, allocation, run_id=run_id, python=python, reports_to_caller=reports_to_caller)
    lead = LeadJob(
        inputs=inputs,
        key=key(token, job_name(spec, replace(allocation, identity=""))),
        ports=None,
        python=python,
        signals=signals,
    )
    job = dispatcher.DispatchedJob(lead=lead, hosts=hosts)
    return serve(partial(dispatcher.run, job), signals, spec.ending_signals)
