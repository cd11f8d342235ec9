"""``python -m fastgraph compare``: a program plain and under fastgraph, side by side."""

from __future__ import annotations

import click
from rich.console import Console

from fastgraph.cli.programs.scripts import Plan, RunError, compare_script
from fastgraph.cli.programs.tables import print_comparison, print_failure


def compare_program(plan: Plan, html: str | None) -> int:
    """Run the program both ways and print the comparison.

    Args:
        plan: what to run.
        html: where to write the page, if one is asked for.

    Returns:
        The exit code: 1 if a run failed, else 0.

    Raises:
        click.ClickException: the page cannot be written, or fastgraph is switched off.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    if html is not None:
        _check_report(html)
    try:
        with Console(stderr=True).status("starting") as status:
            found = compare_script(plan, status.update)
    except RunError as error:
        print_failure(error.run, console)
        return 1
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    print_comparison(found, console)
    if html is not None:
        from fastgraph.cli.programs.report import write_report

        write_report(html, [found])
        console.print(f"Wrote {html}", soft_wrap=True, highlight=False)
    return 0


def _check_report(path: str) -> None:
    """Before anything runs for minutes."""
    from fastgraph.cli.programs.report import check_report

    try:
        check_report(path)
    except (ImportError, OSError) as error:
        raise click.ClickException(f"--html: {error}") from None
