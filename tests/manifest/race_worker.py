"""A process that creates objects at given instants. Reads `key instant` lines, answers `1` or `0` a line."""

import sys
import time

from weightcast.manifest.store import open_store

store, name = open_store(sys.argv[1]), sys.argv[2]
store.create(f"warm/{name}.json", b"connection and folder are there")
print("ready", flush=True)
for line in sys.stdin:
    key, instant = line.split()
    while time.monotonic() < float(instant):
        pass
    print(int(store.create(key, f"{name} {key}".encode())), flush=True)
