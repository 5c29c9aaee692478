# A host of its own for a program: a network with these addresses and names, and a root that is read-only but for /tmp
# and the volumes. Run as `unshare -mnpf --kill-child --mount-proc sh compose_host.sh ADDRESSES HOSTS VOLUMES PROGRAM
# ARGUMENT...`: what the program started ends with it.
set -e
here=$PWD
addresses=$1 hosts=$2 volumes=$3
shift 3
ip link set lo up
for each in $addresses; do ip addr add "$each/32" dev lo; done
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
cd /mnt/root
echo "$hosts" > etc/hosts
for each in $volumes; do mkdir -p ".$each"; done
for each in proc dev sys; do mount --rbind "/$each" "$each"; done
for each in /tmp $volumes; do mount -t tmpfs -o mode=1777 tmpfs ".$each"; done
mount -o remount,ro,bind /mnt/root
exec chroot /mnt/root env -C "$here" setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
