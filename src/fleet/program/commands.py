"""Every command, in the order of help."""
from __future__ import annotations

from fleet.cli.rows import COMMANDS
from fleet.commands.add import cmd_add
from fleet.commands.bench import cmd_bench
from fleet.commands.clean import cmd_clean
from fleet.commands.discover import cmd_discover
from fleet.commands.doctor import cmd_doctor
from fleet.commands.env import cmd_env
from fleet.commands.generate import cmd_generate
from fleet.commands.init import cmd_init
from fleet.commands.install import cmd_install
from fleet.commands.launch import cmd_launch
from fleet.commands.logs import cmd_logs
from fleet.commands.recommend import cmd_recommend
from fleet.commands.run import cmd_run
from fleet.commands.schema import cmd_schema
from fleet.commands.serve import cmd_serve
from fleet.commands.skills import cmd_plugins_install, cmd_skills_install, cmd_skills_list
from fleet.commands.status import cmd_status
from fleet.commands.task_attach import cmd_task_attach
from fleet.commands.task_diff import cmd_task_diff
from fleet.commands.task_land import cmd_task_land
from fleet.commands.task_log import cmd_task_log
from fleet.commands.task_orders import (
    cmd_task_accept,
    cmd_task_add,
    cmd_task_answer,
    cmd_task_forget,
    cmd_task_retry,
    cmd_task_say,
    cmd_task_stop,
)
from fleet.commands.task_tidy import cmd_task_tidy
from fleet.commands.tasks import cmd_tasks
from fleet.commands.trace import cmd_trace
from fleet.commands.trust import cmd_trust
from fleet.commands.ui import cmd_ui
from fleet.commands.up import cmd_up
from fleet.commands.validate import cmd_validate
from fleet.commands.warmup import cmd_warmup
from fleet.commands.worker import cmd_worker
from fleet.program.completion import cmd_completion
from fleet.program.demo import cmd_demo
from fleet.program.help import cmd_help

COMMANDS.extend((
    cmd_up,
    cmd_init,
    cmd_add,
    cmd_worker,
    cmd_recommend,
    cmd_generate,
    cmd_env,
    cmd_trust,
    cmd_validate,
    cmd_discover,
    cmd_status,
    cmd_ui,
    cmd_doctor,
    cmd_logs,
    cmd_trace,
    cmd_warmup,
    cmd_bench,
    cmd_serve,
    cmd_launch,
    cmd_run,
    cmd_tasks,
    cmd_task_add,
    cmd_task_say,
    cmd_task_answer,
    cmd_task_stop,
    cmd_task_retry,
    cmd_task_accept,
    cmd_task_forget,
    cmd_task_attach,
    cmd_task_log,
    cmd_task_diff,
    cmd_task_land,
    cmd_task_tidy,
    cmd_clean,
    cmd_skills_list,
    cmd_skills_install,
    cmd_plugins_install,
    cmd_install,
    cmd_schema,
    cmd_completion,
    cmd_help,
    cmd_demo,
))
