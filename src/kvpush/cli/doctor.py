"""`kvpush doctor`: what is missing or does not fit on this machine, and what to do about it."""

import typer


def doctor_command() -> None:
    """Check this machine: Python, vLLM, NIXL, the plugin, memory, cores, ports, models. Status 1 if it will not do."""
    from kvpush.cli.checks import CHECKS, Verdict, run_check
    from kvpush.cli.output import console

    worst = Verdict.OK
    for check in CHECKS:
        result = run_check(check)
        worst = max(worst, result.verdict)
        console.print(f"{result.verdict.name.lower():8} {result.name:10} {result.found}", markup=False)
        if result.remedy:
            console.print(f"{'':19} -> {result.remedy}", markup=False)
    if worst is Verdict.BROKEN:
        raise typer.Exit(1)
