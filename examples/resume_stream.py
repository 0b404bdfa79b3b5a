#!/usr/bin/env python3
"""Client whose stream survives the death of the router that it is connected to.

    python examples/resume_stream.py --url http://localhost:8000 --model lockstep-moe

Prints a completion as it comes. When the connection breaks, it comes back to the same address, where
another router (``serve --api-server-count 2``) or the restarted one goes on behind the last event. Kill one
with ``kill -9`` and watch.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator


def events(url: str, body: dict[str, object]) -> Iterator[bytes]:
    """Data of the events of a stream, over as many connections as it takes."""
    name, last = uuid.uuid4().hex, ""
    headers = {"content-type": "application/json", "x-lockstep-resumable": "1", "x-request-id": name}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                for line in answer:
                    if line.startswith(b"id: "):
                        last = line[4:].strip().decode()
                    elif line.startswith(b"data: [DONE]"):
                        return
                    elif line.startswith(b"data: "):
                        yield line[6:]
        except urllib.error.HTTPError as error:
            raise SystemExit(error.read().decode()) from error
        except OSError:
            time.sleep(0.2)
        resume = {"last-event-id": last} if last else {}
        request = urllib.request.Request(f"{url}/v1/streams/cmpl-{name}", headers=resume)
        print("<reconnects>", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000", help="(default: %(default)s)")
    parser.add_argument("--model", default="lockstep-moe", help="(default: %(default)s)")
    parser.add_argument("--prompt", default="Once upon a time", help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1000, help="(default: %(default)s)")
    args = parser.parse_args()
    body = {"model": args.model, "prompt": args.prompt, "max_tokens": args.max_tokens, "stream": True}
    for event in events(args.url, body):
        print(json.loads(event)["choices"][0]["text"], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
