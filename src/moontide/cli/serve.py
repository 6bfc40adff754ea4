"""`moontide serve`: streams over HTTP, their tokens, and maintenance of their data."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from moontide.cli.common import CLASS_FILES, note
from moontide.cli.output import counted, emit
from moontide.errors import MissingExtraError, OptionError, missing_extra

if TYPE_CHECKING:
    from moontide.serve.service import Service
    from moontide.serve.stream_store import StreamStore

TOKENS, UPKEEP = Group("Tokens"), Group("Upkeep")


@Parameter(name="*", group=TOKENS)
@dataclass(frozen=True)
class TokenChoice:
    """Options that create and revoke tokens.

    >>> TokenChoice(new_token="camera").asked
    True
    """

    new_token: Annotated[str | None, Parameter(help="Create a token with this name, print it once, and exit.")] = None
    scope: Annotated[
        Literal["read", "push", "admin"], Parameter(help="What the new token allows; each scope includes those before.")
    ] = "admin"
    stream: Annotated[str | None, Parameter(help="Limit the new token to this stream.")] = None
    expires: Annotated[str | None, Parameter(help="When the new token expires, such as 30d, 12h or 15m.")] = None
    revoke_token: Annotated[str | None, Parameter(help="Revoke the token with this name, and exit.")] = None

    @property
    def asked(self) -> bool:
        """Whether the command only manages tokens."""
        return self.new_token is not None or self.revoke_token is not None

    def check(self) -> None:
        """Refuse options that need --new-token without it."""
        if self.new_token is None and (self.scope != "admin" or self.stream is not None or self.expires is not None):
            raise OptionError("'--scope', '--stream' and '--expires' are for '--new-token'; add it, or leave them out.")

    def apply(self, store: StreamStore) -> None:
        """Create and revoke tokens."""
        from moontide.serve.auth import new_token as draw_token
        from moontide.serve.auth import seconds_of

        new, old = self.new_token, self.revoke_token
        if new is not None:
            if not new.strip() or new in store.tokens():
                raise OptionError(f"'--new-token' must be a new name. Got {new!r} instead.")
            ends = None if self.expires is None else time.time() + seconds_of(self.expires)
            token, kept = draw_token(self.scope, self.stream, ends)
            note(f"The token {new!r}, which is shown only once:")
            emit(name=new, token=token)
            print(token, flush=True)  # one that nobody has seen must not be kept
            store.put_token(new, kept.write())
        if old is not None:
            if old not in store.tokens():
                raise OptionError(f"There is no token {old!r}. Known: {', '.join(store.tokens()) or 'none'}.")
            store.put_token(old, None)
            emit(revoked=old)
            note(f"The token {old!r} opens nothing any more.")


@Parameter(name="*", group=UPKEEP)
@dataclass(frozen=True)
class Upkeep:
    """Options that maintain the data of a server.

    >>> Upkeep().asked
    False
    """

    verify: Annotated[
        str | None, Parameter(help="Check the data in this folder or URL, and exit: status 1 if damaged.")
    ] = None
    backup: Annotated[
        Path | None, Parameter(help="Copy the data into this new folder, even while a server is running, and exit.")
    ] = None
    restore: Annotated[
        Path | None, Parameter(help="Fill the folder of '--data' from this backup, or from damaged data, and exit.")
    ] = None

    @property
    def asked(self) -> bool:
        """Whether the command only maintains data."""
        return self != NO_UPKEEP

    def apply(self, data: str) -> int:
        """Run the maintenance and return the exit status."""
        from moontide.serve import backup as copies

        if self.verify is not None:
            damage, streams = copies.verify(self.verify)
            for sentence in damage:
                print(sentence)
            emit(damage=damage, streams=streams)
            many = "no damage" if not damage else counted(len(damage), "damage")
            note(f"{self.verify}: {many} in {counted(streams, 'stream')}.")
            return 1 if damage else 0
        if self.backup is not None:
            copies.backup(data, self.backup)
            emit(data=data, backup=self.backup)
            note(f"The data of {data} are in {self.backup}.")
        elif self.restore is not None:
            copies.restore(self.restore, data)
            emit(data=data, restored=self.restore)
            note(f"The data of {self.restore} are in {data}.")
        return 0


@Parameter(name="*")
@dataclass(frozen=True)
class ImageChoice:
    """The options for streams that take images and class names."""

    encoder: Annotated[
        str | None, Parameter(help="Encoder for images and class names; without it, only embeddings are accepted.")
    ] = None
    classes: Annotated[str | None, Parameter(help=f"Class names of the stream 'default': {CLASS_FILES}.")] = None
    samples: Annotated[Path | None, Parameter(help="A folder of images that the page offers as samples.")] = None
    device: Annotated[str, Parameter(help="Device: cpu, cuda, cuda:1 or mps.")] = "cpu"

    def check(self) -> None:
        """Refuse what needs an encoder, without one."""
        if self.classes is not None and self.encoder is None:
            raise OptionError("'--classes' needs '--encoder', which embeds them; or create streams with prototypes.")
        if self.samples is not None and self.encoder is None:
            raise OptionError("'--samples' needs '--encoder', which embeds them; leave it out, or add one.")

    def service(self, store: StreamStore) -> Service:
        """Make what answers requests, over the data of a store."""
        from moontide.encoders import encoder
        from moontide.serve.auth import Gate, Token
        from moontide.serve.images import list_images
        from moontide.serve.service import Service
        from moontide.store.classes import read_classes

        return Service(
            store,
            gate=Gate({name: Token.read(kept) for name, kept in store.tokens().items()}),
            encoder=None if self.encoder is None else encoder(self.encoder, self.device),
            classes=() if self.classes is None else read_classes(self.classes),
            samples=[] if self.samples is None else list_images(self.samples),
            device=self.device,
        )


NO_TOKEN_CHOICE, NO_UPKEEP, NO_IMAGE_CHOICE = TokenChoice(), Upkeep(), ImageChoice()  # no option given


def serve(
    *,
    host: Annotated[str, Parameter(help="The address to listen on; other machines need tokens.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="The port; 0 picks a free one.")] = 8000,
    data: Annotated[str, Parameter(help="Where streams are kept: a folder, or a postgresql:// URL.")] = "moontide-data",
    fsync: Annotated[
        Literal["always", "interval", "never"],
        Parameter(help="When a push is synced: before the answer, within a second, or by the system."),
    ] = "always",
    images: ImageChoice = NO_IMAGE_CHOICE,
    log_format: Annotated[Literal["text", "json"], Parameter(help="Format of the log.")] = "text",
    tokens: TokenChoice = NO_TOKEN_CHOICE,
    upkeep: Upkeep = NO_UPKEEP,
) -> int:
    """Serve streams over HTTP: push images or embeddings and get labels that adapt. Answered pushes are never lost.

    The page at / shows a stream live, and /docs lists all requests. For example:

        moontide serve
        moontide serve --new-token camera --scope push --stream camera --expires 30d
        moontide serve --host 0.0.0.0 --data postgresql://moontide@db/streams
    """
    try:
        from moontide.serve.databases import open_store
        from moontide.serve.server import check_port, run
    except MissingExtraError:
        raise
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "serve", "The server") from None
    from moontide.core.devices import check_device

    images.check()
    tokens.check()
    check_port(port)
    if upkeep.asked:
        return upkeep.apply(data)
    check_device(images.device)
    with closing(open_store(data, fsync, lock=not tokens.asked)) as store:
        if tokens.asked:
            tokens.apply(store)
            return 0
        run(images.service(store), host, port, log_format)
    return 0
