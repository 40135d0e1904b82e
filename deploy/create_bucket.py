"""Creates the bucket named on the command line, or finds that it is there: safe to run at every start.

Endpoint, region and credentials come from the AWS_* environment.
"""

from __future__ import annotations

import contextlib
import sys

from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import get_session


def main(bucket: str) -> int:
    """Returns the exit code: 0 if the bucket exists and is ours."""
    try:
        client = get_session().create_client("s3")
        with contextlib.suppress(
            client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
        ):
            client.create_bucket(Bucket=bucket)
        # A name that was taken already may be somebody else's.
        client.head_bucket(Bucket=bucket)
    except (BotoCoreError, ClientError) as error:
        sys.stderr.write(f"create_bucket: no bucket {bucket!r} for us: {error}\n")
        return 15
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: create_bucket.py BUCKET")
    sys.exit(main(sys.argv[1]))
