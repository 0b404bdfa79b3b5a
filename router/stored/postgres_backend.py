"""PostgreSQL as the store, for routers of several hosts.

The tables are in the schema ``lockstep``. A router lives while its session holds an advisory lock, which the
server releases once the connection is gone. A router whose connection broke takes its lock again; what others
have taken over by then is theirs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from coordinator.distribution import install_extra
from router.stored.backend import Rows, Session
from router.stored.schema import ANSWERS, COUNTED, REST, VERSION, statements_of

if TYPE_CHECKING:
    import psycopg

SCHEMES = ("postgresql", "postgres")
CONNECT_SECONDS = 5
RETRY_SECONDS = 5.0
"""Pause after a connection that failed; what comes meanwhile fails at once."""
SETTINGS = {
    "search_path": "lockstep",
    "lock_timeout": "10s",  # longest wait for another router's transaction
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "10s",  # then a stopped router is dead
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""Settings of each session."""
TYPES = {
    "BLOB": "BYTEA",
    "REAL": "DOUBLE PRECISION",
    "INTEGER": "BIGINT",
    "WITHOUT ROWID": "",
}
"""Words of the schema that PostgreSQL has another one for."""
COUNTING = """
CREATE FUNCTION lockstep.count_bytes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  UPDATE lockstep.totals SET bytes = bytes
    + CASE TG_OP WHEN 'DELETE' THEN 0 ELSE NEW.bytes END - CASE TG_OP WHEN 'INSERT' THEN 0 ELSE OLD.bytes END;
  RETURN NULL;
END $$
"""


def url_problem(url: str) -> str | None:
    """Why there can be no store at this URL; None if there may be one."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.path.strip("/"):
        return "--store-url must be like postgresql://USER@HOST/DATABASE"
    if importlib.util.find_spec("psycopg") is None:
        return f"--store-url needs psycopg: {install_extra('postgres')}, or leave the flag out"
    return None


class PostgresBackend:
    """Session of this router, made anew where it broke."""

    def __init__(self, url: str) -> None:
        """``url``: see :func:`url_problem`. Raises ValueError where that names a problem."""
        if problem := url_problem(url):
            raise ValueError(problem)
        import psycopg

        self.failures: tuple[type[Exception], ...] = (psycopg.Error,)
        self._connect_to = psycopg.connect
        self._url = url
        self._owner = ""
        self._connection: psycopg.Connection[Any] | None = None
        self._failed_at = -RETRY_SECONDS
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        parts = urlsplit(self._url)  # without the password
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"

    def open(self, owner: str) -> None:
        """See :class:`.Backend`."""
        self._owner = owner
        connection = self._living()
        try:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_key_of("store"),))
                _make_schema(connection)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """See :class:`.Backend`."""
        if self._connection is not None:
            self._connection.close()

    def forget(self) -> None:
        """See :class:`.Backend`."""
        self._living().execute("SELECT pg_advisory_unlock(%s)", (_key_of(self._owner),))

    @contextlib.contextmanager
    def transaction(self, *, only_adds: bool) -> Iterator[Session]:
        """See :class:`.Backend`."""
        begin = f"BEGIN; SELECT pg_advisory_xact_lock{'_shared' * only_adds}({_key_of('store')})"
        connection = self._living()
        try:
            connection.execute(begin)
        except self.failures:
            if not connection.closed:
                connection.execute("ROLLBACK")
                raise
            connection = self._living()  # it broke since the last transaction
            connection.execute(begin)
        try:
            yield _PostgresSession(connection)
        except BaseException:
            if not connection.closed:
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def lives(self, owner: str) -> bool:
        """See :class:`.Backend`."""
        query = "SELECT pg_try_advisory_xact_lock(%s)"  # released with the transaction
        (was_free,) = self._living().execute(query, (_key_of(owner),)).fetchone() or (False,)
        return not was_free

    def _living(self) -> psycopg.Connection[Any]:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        if self._failure is not None and time.monotonic() - self._failed_at < RETRY_SECONDS:
            raise self._failure
        try:
            self._connection = self._connected()
        except self.failures as error:
            self._failed_at, self._failure = time.monotonic(), error
            raise
        return self._connection

    def _connected(self) -> psycopg.Connection[Any]:
        connection = self._connect_to(
            self._url,
            autocommit=True,
            application_name=f"lockstep {self._owner}",
            connect_timeout=CONNECT_SECONDS,
            keepalives_idle=5,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=15_000,
        )
        try:
            for name, value in SETTINGS.items():
                connection.execute("SELECT set_config(%s, %s, false)", (name, value))
            connection.execute(  # a session of this router that the server has not given up yet
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = current_setting('application_name') AND pid != pg_backend_pid()"
            )
            connection.execute("SELECT pg_advisory_lock(%s)", (_key_of(self._owner),))
        except BaseException:
            connection.close()
            raise
        return connection


class _PostgresSession:
    """:class:`.Session` of a connection."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows:
        rows: Rows = self._connection.execute(_translated(statement), values)
        return rows

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Rows:
        cursor = self._connection.cursor()
        cursor.executemany(_translated(statement), rows)
        written: Rows = cursor
        return written


@functools.lru_cache(256)
def _translated(statement: str) -> str:
    return statement.replace("%", "%%").replace("?", "%s")


@functools.lru_cache(1024)
def _key_of(name: str) -> int:
    """Key of an advisory lock: 64 bits, with a sign."""
    digest = hashlib.blake2b(b"lockstep " + name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _make_schema(connection: psycopg.Connection[Any]) -> None:
    """Make the schema if there is none; raises NotSupportedError for one of another version."""
    import psycopg

    row = connection.execute("SELECT to_regclass('lockstep.version')").fetchone()
    if row is not None and row[0] is not None:
        (version,) = connection.execute("SELECT number FROM version").fetchone() or (0,)
        if version != VERSION:
            message = f"its schema has version {version}, this Lockstep's {VERSION}"
            raise psycopg.NotSupportedError(message)
        return
    script = ANSWERS + REST
    for word, other in TYPES.items():
        script = script.replace(word, other)
    for statement in (
        "CREATE SCHEMA IF NOT EXISTS lockstep",
        *statements_of(script),
        "INSERT INTO totals VALUES (0)",
        COUNTING,
        *(
            f"CREATE TRIGGER {table}_bytes AFTER INSERT OR DELETE OR UPDATE OF bytes ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION lockstep.count_bytes()"
            for table in COUNTED
        ),
        "CREATE TABLE version (number BIGINT NOT NULL)",
        f"INSERT INTO version VALUES ({VERSION})",
    ):
        connection.execute(statement)
