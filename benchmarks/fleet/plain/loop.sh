#!/bin/bash
# The loop that people write: loop.sh PARALLEL deploy|verify|rollback KEY KNOWN_HOSTS PATCHED DESTINATION...
# PATCHED is a folder with the finished worker and the new module; server_args.py is edited by sed.
set -euo pipefail
parallel=$1 step=$2 key=$3 known=$4 patched=$5
shift 5
export key known
TREE=/srv/sglang/sglang/srt BACKUP=/srv/backup
FILES="server_args.py speculative/eagle_worker_v2.py"
CHECK="grep -n -e speculative_disable_batch_threshold -e speculative-disable-batch-threshold server_args.py >/dev/null &&
  /usr/bin/python3 -c 'import sys; [compile(open(f).read(), f, \"exec\") for f in sys.argv[1:]]' $FILES speculative/batch_threshold.py"

case $step in
deploy) script="cd $TREE && mkdir -p $BACKUP && for f in $FILES; do [ -e $BACKUP/\$f ] || cp -p --parents \$f $BACKUP/; done
  tar -x
  grep -q speculative_disable_batch_threshold server_args.py || sed -i \
    -e '/^    speculative_accept_threshold_acc: float = 1.0/a\\    speculative_disable_batch_threshold: int = 0  # 0 = always speculate' \
    -e '/\"--speculative-token-map\",/{x;s/.*//;x}' \
    -e '/^            default=ServerArgs.speculative_accept_threshold_acc,/{n;a\\        parser.add_argument(\n            \"--speculative-disable-batch-threshold\",\n            type=int,\n            default=ServerArgs.speculative_disable_batch_threshold,\n        )
}' server_args.py
  $CHECK" ;;
verify) script="cd $TREE && $CHECK" ;;
rollback) script="cd $TREE && cp -p -r $BACKUP/. ./ && rm -f speculative/batch_threshold.py" ;;
esac
if [ "$step" = deploy ]; then
  payload=(tar -C "$patched/sglang/srt" -c speculative/eagle_worker_v2.py speculative/batch_threshold.py)
else
  payload=(true)
fi
printf -v script '%q' "$script"
export script payload_line="${payload[*]@Q}"
printf '%s\0' "$@" | xargs -0 -n 1 -P "$parallel" bash -c '
  set -o pipefail
  eval "$payload_line" | ssh -F /dev/null -i "$key" -o IdentitiesOnly=yes -o BatchMode=yes -o StrictHostKeyChecking=yes \
    -o UserKnownHostsFile="$known" "$1" "sudo -n sh -c $script"' loop
