"""The child that converts Parquet to JSON lines under memory and output limits (rows.py).

Exit 0: done. 65: the last line of output says what is wrong with the file. Anything else: it
crashed.
"""

from __future__ import annotations

import os
import resource
import sys

BATCH_ROWS = 64


def main() -> None:
    """argv: source, target, MiB of memory, bytes of output, bytes per row."""
    source, target = sys.argv[1], sys.argv[2]
    memory, most, line_bytes = int(sys.argv[3]) << 20, int(sys.argv[4]), int(sys.argv[5])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    os.environ["OMP_NUM_THREADS"] = "1"
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    row = written = 0
    try:
        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        with pq.ParquetFile(source) as file, open(target, "wb") as out:  # noqa: PTH123
            for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                for record in batch.to_pylist():
                    row += 1
                    line = json.dumps(record, default=str).encode() + b"\n"
                    written += len(line)
                    if len(line) > line_bytes:
                        refuse(f"row {row} is longer than {line_bytes} bytes")
                    if written > most:
                        refuse(f"row {row}: the file unfolds into more than {most} bytes")
                    out.write(line)
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        refuse(f"row {row + 1} or after cannot be read: {first[:200]}")


def refuse(sentence: str) -> None:
    """Prints what is wrong and exits."""
    print(sentence)
    sys.stdout.flush()
    os._exit(65)


if __name__ == "__main__":
    main()
