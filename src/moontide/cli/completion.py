"""`moontide completion`: print a shell completion script."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from moontide.cli.output import emit


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")], /) -> None:
    """Print a script that completes commands and options in a shell.

    For example:

        moontide completion bash > ~/.local/share/bash-completion/completions/moontide
        moontide completion zsh > ~/.zfunc/_moontide
        moontide completion fish > ~/.config/fish/completions/moontide.fish
    """
    from moontide.cli import app

    script = app.generate_completion(prog_name="moontide", shell=shell)
    emit(shell=shell, script=script)
    print(script)
