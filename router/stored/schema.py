"""Schema of the store, in the SQL that SQLite and PostgreSQL share.

It is documented in docs/use/stored-answers.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from router.stored.backend import Session

VERSION = 2
"""Version of the schema; a store of a later one is refused."""
ANSWERS = """
CREATE TABLE answers (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  state TEXT NOT NULL, owner TEXT NOT NULL, request BLOB NOT NULL, input BLOB NOT NULL, answer BLOB,
  events BLOB, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX answers_by_expiry ON answers (expires);
CREATE INDEX answers_by_state ON answers (state);
CREATE TABLE tokens (
  id TEXT NOT NULL, number INTEGER NOT NULL, batch BLOB NOT NULL, PRIMARY KEY (id, number)
) WITHOUT ROWID;
"""
"""Schema of version 1."""
REST = """
CREATE TABLE files (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  name TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, is_whole INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE file_parts (
  file TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, number)
);
CREATE TABLE batches (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  state TEXT NOT NULL, owner TEXT NOT NULL, input TEXT NOT NULL, body BLOB NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX batches_by_state ON batches (state);
CREATE TABLE batch_lines (
  batch TEXT NOT NULL, number INTEGER NOT NULL, is_error INTEGER NOT NULL, answer BLOB NOT NULL,
  bytes INTEGER NOT NULL, PRIMARY KEY (batch, number)
);
CREATE TABLE conversations (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  metadata BLOB NOT NULL, items BLOB NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE totals (bytes INTEGER NOT NULL);
"""
ENDED = "'completed', 'failed', 'expired', 'cancelled'"
"""States of batches that have ended, in SQL."""
READ_FILES = f"SELECT input FROM batches WHERE state NOT IN ({ENDED})"
"""Input files of batches that have not ended, in SQL."""
COUNTED = ("answers", "files", "batches", "batch_lines", "conversations")
"""Tables whose column ``bytes`` counts."""


def statements_of(script: str) -> Iterator[str]:
    """Statements of a script, one by one."""
    return filter(str.strip, script.split(";"))


def total_of(session: Session) -> int:
    """Bytes that all tables hold."""
    (held,) = session.execute("SELECT bytes FROM totals").fetchone()
    return int(held)


def expire(session: Session, now: float) -> None:
    """Delete what has expired, with what belongs to it."""
    session.execute("DELETE FROM answers WHERE state != 'running' AND expires <= ?", (now,))
    session.execute("DELETE FROM conversations WHERE expires <= ?", (now,))
    for table, part, key, condition in (
        ("batches", "batch_lines", "batch", f"state IN ({ENDED}) AND expires <= ?"),
        ("files", "file_parts", "file", f"expires <= ? AND id NOT IN ({READ_FILES})"),
    ):
        ids = [row[0] for row in session.execute(f"SELECT id FROM {table} WHERE {condition}", (now,))]
        for id in ids:
            session.execute(f"DELETE FROM {part} WHERE {key} = ?", (id,))
            session.execute(f"DELETE FROM {table} WHERE id = ?", (id,))
