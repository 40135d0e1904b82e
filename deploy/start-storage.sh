#!/bin/sh
# Fills the secrets of the environment into s3-users.json, then becomes the S3 server. Arguments go to `weed server`.
set -eu
umask 077

users=$(mktemp)
awk '
  {
    line = ""
    while (match($0, /\$\{[A-Z_]+\}/)) {
      name = substr($0, RSTART + 2, RLENGTH - 3)
      if (ENVIRON[name] !~ /^[A-Za-z0-9._~+\/=-]+$/) {
        print "start-storage: " name " is empty or has a character outside A-Z a-z 0-9 . _ ~ + / = -" > "/dev/stderr"
        exit 2
      }
      line = line substr($0, 1, RSTART - 1) ENVIRON[name]
      $0 = substr($0, RSTART + RLENGTH)
    }
    print line $0
  }
' "$(dirname "$0")/s3-users.json" >"$users"

exec weed server -s3.config="$users" "$@"
