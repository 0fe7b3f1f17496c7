"""API keys: whose they are, from flags or from a file that is read again while the server runs.

    - name: research                  # in log lines, metrics and /v1/usage; the key never is
      key: sha256:9f86d081884c7d65... # the key itself, or its SHA-256 so; a list while one replaces another
      weight: 2                       # under the fair policy; 1 by default
      requests_per_minute: 600        # this and the next two: without limit by default
      tokens_per_minute: 100000
      requests_at_once: 8
      isolate_cache: true             # shares cached prefixes with nobody; false by default

Kept and compared are digests of equal length. Knows the names and limits of tenants, and not what is asked with a key.
"""

import hashlib
import hmac
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import yaml
from msgspec import Meta
from starlette.types import Scope

from aserve.core.errors import ConfigError
from aserve.http.access import TENANT_KEY
from aserve.tenants import Limits, Tenant, Tenants

MAX_KEYS: Final = 1024
"""All are compared with each request's."""
MAX_FILE_BYTES: Final = 1024 * 1024

_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key"})
_HASH: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_log = logging.getLogger(__name__)

EMPTY: Final = hashlib.sha256(b"").digest()
"""What `printf %s "$KEY" | sha256sum` says where there is no KEY."""

Count = Annotated[int, Meta(ge=1, le=10**12)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant, as the file has it."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
    key: Annotated[str, Meta(min_length=1)] | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    requests_at_once: Count | None = None
    isolate_cache: bool = False

    def tenant(self) -> Tenant:
        """Without its keys."""
        limits = Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            requests_at_once=self.requests_at_once,
        )
        return Tenant(name=self.name, weight=self.weight, limits=limits, isolate_cache=self.isolate_cache)

    def digests(self) -> list[bytes]:
        """Of its keys."""
        return [digest_of(key) for key in ([self.key] if isinstance(self.key, str) else self.key)]


@dataclass(frozen=True, slots=True)
class Keys:
    """digests: of each key, and the name of the tenant whose it is."""

    digests: Sequence[tuple[bytes, str]]
    tenants: Sequence[Tenant] = ()


def digest_of(key: str) -> bytes:
    """32 bytes: the SHA-256 of a key, or what stands in its place. Raises `ConfigError` for what is not one."""
    if not key.startswith("sha256:"):
        return _digest(key)
    found = _HASH.fullmatch(key)
    if found is None:
        raise ConfigError("a key that begins with sha256: must go on with 64 hexadecimal digits")
    digest = bytes.fromhex(found[1])
    if digest == EMPTY:
        raise ConfigError("a key's hash is that of an empty text: who sends none would have it")
    return digest


def _digest(key: str) -> bytes:
    """Of a key itself. Raises `ConfigError` for one that everybody has, or that nobody could send in a header."""
    if not key:
        raise ConfigError("a key may not be empty: who sends none would have it")
    if key != key.strip():
        raise ConfigError("a key may not begin or end with white space, which HTTP takes off headers")
    return hashlib.sha256(key.encode()).digest()


def parse_keys(text: str) -> Keys:
    """The keys of a file. Raises `ConfigError`, which has no character of any key."""
    try:
        raw: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's own text quotes the line
        raise ConfigError(f"it is not YAML{f' (line {mark.line + 1})' if mark else ''}") from None
    try:
        entries = msgspec.convert(raw, list[Entry])
    except msgspec.ValidationError as error:
        raise ConfigError(f"it must be a list of tenants: {str(error).replace('`', '')}") from None
    for name, count in Counter(entry.name for entry in entries).items():
        if count > 1:
            raise ConfigError(f"the name {name} is in it {count} times")
    digests = [(digest, entry.name) for entry in entries for digest in entry.digests()]
    if len(digests) > MAX_KEYS:
        raise ConfigError(f"it may have {MAX_KEYS} keys, and has {len(digests)}")
    if len({digest for digest, _ in digests}) < len(digests):
        raise ConfigError("a key is in it twice")
    return Keys(digests, [entry.tenant() for entry in entries])


class Keyring:
    """Tells whose key a request has. api_keys: those of nobody in particular, whose tenant has no name.

    path: of the file with the others; read at once. Raises `ConfigError` for a file or a key that cannot be used.
    tenants: are told who is in it.
    """

    def __init__(
        self, api_keys: Sequence[str] = (), *, path: str | Path | None = None, tenants: Tenants | None = None
    ) -> None:
        self._given = [(_digest(key), "") for key in api_keys]
        self._digests: Sequence[tuple[bytes, str]] = self._given
        self._path = None if path is None else Path(path)
        self._tenants = tenants
        self.is_open = not api_keys and path is None
        """Whether no key is asked for."""
        if self._path is not None:
            self._read(self._path)

    def reload(self) -> None:
        """Read the file again. If it cannot be used, a line in the log says why, and the keys stay as they are."""
        if self._path is None:
            return
        try:
            num_tenants = self._read(self._path)
        except ConfigError as error:
            _log.error("the API keys stay as they are: %s", error.message)
        else:
            _log.info("the API keys were read again: %d tenants", num_tenants)

    def tenant_of(self, key: bytes) -> str | None:
        """The name of the tenant with that key; None if it is nobody's. Compares with all, in constant time."""
        digest = hashlib.sha256(key).digest()
        found = None
        for expected, name in self._digests:
            if hmac.compare_digest(digest, expected):
                found = name
        return found

    def _read(self, path: Path) -> int:
        """Take the file's keys instead of those it had; how many tenants it has."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ConfigError(f"it is larger than {MAX_FILE_BYTES} bytes")
            keys = parse_keys(content.decode())
        except OSError as error:
            raise ConfigError(f"--api-keys-file: cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--api-keys-file: {path}: it is not UTF-8") from None
        except ConfigError as error:
            raise ConfigError(f"--api-keys-file: {path}: {error.message}") from None
        self._digests = [*self._given, *keys.digests]
        if self._tenants is not None:
            self._tenants.declare(keys.tenants)
        return len(keys.tenants)


def holder(scope: Scope, keyring: Keyring) -> str | None:
    """The tenant whose key a request's Authorization header has, or else its X-Api-Key; None without a valid one."""
    given = {name: value for name, value in scope["headers"] if name in _CREDENTIALS}
    if sum(name in given for name, _ in scope["headers"]) > len(given):
        return None  # two of one kind
    scheme, _, key = given.get(b"authorization", b"").partition(b" ")
    bearer = keyring.tenant_of(key.strip()) if scheme.lower() == b"bearer" else None
    return keyring.tenant_of(given[b"x-api-key"]) if bearer is None and b"x-api-key" in given else bearer


def tenant_of(scope: Scope) -> str:
    """The name of the tenant whose request it is; "" where nobody is told apart."""
    return str(scope.get(TENANT_KEY, ""))
