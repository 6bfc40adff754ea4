"""`moontide completion`: print a shell completion script."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")], /) -> None:
    """Print a shell script that completes commands and options.

    For example:

    moontide completion bash > ~/.local/share/bash-completion/completions/moontide
    moontide completion zsh > ~/.zfunc/_moontide
    moontide completion fish > ~/.config/fish/completions/moontide.fish
    """
    from moontide.cli import app

    print(app.generate_completion(prog_name="moontide", shell=shell))
