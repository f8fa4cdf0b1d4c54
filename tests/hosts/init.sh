#!/bin/bash
# Becomes PID 1 of a test host: runs in fresh mount, pid, uts, ipc and cgroup namespaces, puts the root together and executes systemd.
# Every mount made here is private, so it vanishes with PID 1.   Arguments: NAME HOSTDIR   Environment: SGLANG MODELS STORE_SIZE
set -euo pipefail
name=$1 dir=$2 root=$2/root
mount -t overlay "host-$name" -o "lowerdir=/,upperdir=$dir/up,workdir=$dir/work" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
mount -t tmpfs -o mode=755,nosuid dev "$root/dev"
for node in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 "$root/dev/${node%:*}" c 1 "${node#*:}"; done
mknod -m 666 "$root/dev/tty" c 5 0
mkdir "$root"/dev/{pts,shm}
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for stream in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${stream%:*}" "$root/dev/${stream#*:}"; done
mount -t tmpfs -o mode=1777,nosuid,nodev shm "$root/dev/shm"
mount -t tmpfs -o mode=755,nosuid,nodev run "$root/run"
if [ -n "${SGLANG:-}" ]; then       # one environment for all hosts, a writable layer for each
  mount -t overlay sglang -o "lowerdir=$SGLANG,upperdir=$dir/sglang-up,workdir=$dir/sglang-work" "$root/opt/sglang"
fi
if [ -n "${MODELS:-}" ]; then mount --bind "$MODELS" "$root/opt/models"; mount -o remount,bind,ro "$root/opt/models"; fi
if [ -n "${STORE_SIZE:-}" ]; then mount -t tmpfs -o "mode=700,size=$STORE_SIZE" store "$root/var/lib/specgate"; fi
cgroup=$root/sys/fs/cgroup
if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then
  mount -t cgroup2 -o nosuid,nodev,noexec cgroup "$cgroup"
else                                # a machine with version 1 hierarchies: the same ones, writable
  mount -t tmpfs -o mode=755 cgroup "$cgroup"
  for each in $(awk '$3 == "cgroup" && $2 ~ "^/sys/fs/cgroup/" {print substr($2, 16)}' /proc/mounts); do
    mkdir "$cgroup/$each"
    if [ "$each" = systemd ]; then options=none,name=systemd; else options=$each; fi
    mount -t cgroup -o "nosuid,nodev,noexec,$options" cgroup "$cgroup/$each"
  done
  mkdir "$cgroup/unified"
  mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$cgroup/unified"
fi
mount -o bind,ro "$root/proc/sys" "$root/proc/sys"
hostname "$name"
cd "$root"
mkdir -p .old
pivot_root . .old
# the clock, the kernel's modules and its log belong to the machine
drop=-sys_time,-sys_module,-sys_rawio,-syslog,-audit_control,-wake_alarm,-block_suspend
# systemd in a container leaves mounts private; shared, as on a real host, it can hand credentials to services
exec chroot . /bin/sh -c "umount -l /.old; rmdir /.old; mount --make-rshared /
  exec setpriv --bounding-set $drop env -i container=testhost LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --show-status=no" </dev/null
