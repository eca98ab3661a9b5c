"""A file system that shows a folder, and answers or not: a FUSE server by hand. Its stdin says which requests wait.

`python fuse_server.py FOLDER MOUNT`. A line `hang mkdir,open` has such requests wait, `hang all` every one, `answer` ends that.
Who waits for a request that was read cannot be killed, as with a dead file server. Once stdin is at its end all is gone.
"""

import ctypes
import errno
import fcntl
import os
import selectors
import stat
import struct
import sys
from collections.abc import Callable

HEADER = struct.Struct("<IIQQIIIHH")  # linux/fuse.h: fuse_in_header
REPLY = struct.Struct("<IiQ")  # fuse_out_header
NAMES = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release",
    20: "fsync", 25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "release", 30: "fsync", 32: "flock",
    33: "flock", 34: "access", 35: "create", 36: "interrupt", 42: "forget", 45: "rename",
}  # fmt: skip
UNANSWERED = ("forget", "interrupt")
POSIX_LOCKS, FLOCK_LOCKS, BIG_WRITES = 1 << 1, 1 << 10, 1 << 5


class Server:
    """The nodes that the kernel knows, by number, and the requests that wait."""

    def __init__(self, folder: str, device: int) -> None:
        self.device = device
        self.kind = 0  # of the request that is answered
        self.paths = {1: folder}
        self.numbers = {folder: 1}
        self.hangs: frozenset[str] = frozenset()
        self.waiting: list[bytes] = []

    def on_request(self) -> None:
        request = os.read(self.device, 1 << 18)
        name = NAMES.get(HEADER.unpack_from(request)[1], "")
        if name in UNANSWERED:
            return
        if name != "init" and self.hangs & {name, "all"}:
            self.waiting.append(request)
        else:
            self.answer(request)

    def on_order(self, order: str) -> None:
        kind, _, names = order.partition(" ")
        self.hangs = frozenset(names.split(",")) if kind == "hang" else frozenset()
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            self.answer(request)

    def answer(self, request: bytes) -> None:
        _, kind, unique, node, *_ = HEADER.unpack_from(request)
        self.kind, body, error = kind, b"", 0
        handler: Callable[[int, bytes], bytes] | None = getattr(self, f"on_{NAMES.get(kind, '')}", None)
        try:
            if handler is None:
                raise OSError(errno.ENOSYS, "")
            body = handler(node, request[HEADER.size :])
        except OSError as raised:
            error = -(raised.errno or errno.EIO)
        try:
            os.write(self.device, REPLY.pack(REPLY.size + len(body), error, unique) + body)
        except OSError:  # who has asked was killed before
            pass

    # --- what is asked

    def on_init(self, node: int, data: bytes) -> bytes:
        _, _, ahead, flags = struct.unpack_from("<IIII", data)
        wanted = flags & (FLOCK_LOCKS | BIG_WRITES)
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, ahead, wanted, 12, 9, 1 << 17, 1, 32, 0, 0)

    def child(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], os.fsdecode(name.split(b"\0")[0]))

    def attributes(self, found: os.stat_result) -> bytes:
        times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
        parts = [at % 1_000_000_000 for at in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        rest = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
        return struct.pack("<QQQQQQIIIIIIIIII", found.st_ino, found.st_size, found.st_blocks, *times, *parts, *rest)

    def entry(self, path: str) -> bytes:
        attributes = self.attributes(os.lstat(path))
        number = self.numbers.setdefault(path, len(self.numbers) + 1)
        self.paths[number] = path
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + attributes

    def on_lookup(self, node: int, data: bytes) -> bytes:
        return self.entry(self.child(node, data))

    def on_getattr(self, node: int, data: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", data)
        found = os.fstat(handle) if flags & 1 else os.lstat(self.paths[node])
        return struct.pack("<QII", 0, 0, 0) + self.attributes(found)

    def on_setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, part, _, mode, _, uid, gid = struct.unpack_from("<IIQQQQQQIIIIIII", data)
        path = self.paths[node]
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 6:
            os.lchown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(path, size)
        if valid & 256:
            os.utime(path)
        elif valid & 32:
            os.utime(path, ns=(mtime * 10**9 + part,) * 2)
        return struct.pack("<QII", 0, 0, 0) + self.attributes(os.lstat(path))

    def on_readlink(self, node: int, data: bytes) -> bytes:
        return os.fsencode(os.readlink(self.paths[node]))

    def on_symlink(self, node: int, data: bytes) -> bytes:
        name, target = data.split(b"\0")[:2]
        os.symlink(target, os.fsencode(self.child(node, name)))
        return self.entry(self.child(node, name))

    def on_mknod(self, node: int, data: bytes) -> bytes:
        mode, device, umask, _ = struct.unpack_from("<IIII", data)
        os.mknod(self.child(node, data[16:]), mode & ~umask, device)
        return self.entry(self.child(node, data[16:]))

    def on_mkdir(self, node: int, data: bytes) -> bytes:
        mode, umask = struct.unpack_from("<II", data)
        os.mkdir(self.child(node, data[8:]), mode & ~umask)
        return self.entry(self.child(node, data[8:]))

    def on_unlink(self, node: int, data: bytes) -> bytes:
        os.unlink(self.child(node, data))
        self.numbers.pop(self.child(node, data), None)
        return b""

    def on_rmdir(self, node: int, data: bytes) -> bytes:
        os.rmdir(self.child(node, data))
        return b""

    def on_rename(self, node: int, data: bytes) -> bytes:
        (to,) = struct.unpack_from("<Q", data)
        names = data[8 if self.kind == 12 else 16 :].split(b"\0")
        old, new = self.child(node, names[0]), self.child(to, names[1])
        os.rename(old, new)
        for path, number in list(self.numbers.items()):
            if path == old or path.startswith(f"{old}/"):
                del self.numbers[path]
                self.paths[number] = new + path.removeprefix(old)
                self.numbers[self.paths[number]] = number
        return b""

    def on_open(self, node: int, data: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", data)
        fd = os.open(self.paths[node], flags & ~(os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL))
        return struct.pack("<QII", fd, 0, 0)

    on_opendir = on_open

    def on_create(self, node: int, data: bytes) -> bytes:
        flags, mode, umask, _ = struct.unpack_from("<IIII", data)
        path = self.child(node, data[16:])
        fd = os.open(path, flags | os.O_CREAT, mode & ~umask)
        return self.entry(path) + struct.pack("<QII", fd, 0, 0)

    def on_read(self, node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(handle, size, offset)

    def on_write(self, node: int, data: bytes) -> bytes:
        handle, offset, size, *_ = struct.unpack_from("<QQIIQI", data)
        content = data[40 : 40 + size]
        appends = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_APPEND
        return struct.pack("<II", os.write(handle, content) if appends else os.pwrite(handle, content, offset), 0)

    def on_readdir(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        listed = b""
        for number, name in enumerate(sorted(os.listdir(os.fsencode(self.paths[node])))[offset:], offset + 1):
            entry = struct.pack("<QQII", number + 1, number, len(name), 0) + name
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed

    def on_statfs(self, node: int, data: bytes) -> bytes:
        found = os.statvfs(self.paths[1])
        sizes = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<QQQQQIIII24x", *sizes, found.f_bsize, 255, found.f_frsize, 0)

    def on_release(self, node: int, data: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    def on_flush(self, node: int, data: bytes) -> bytes:
        return b""

    on_fsync = on_access = on_flush

    def on_flock(self, node: int, data: bytes) -> bytes:
        handle, _, _, _, kind, _ = struct.unpack_from("<QQQQII", data)
        how = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}[kind]
        fcntl.flock(handle, how | fcntl.LOCK_NB)
        return b""


def main(folder: str, mount: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if ctypes.CDLL(None, use_errno=True).mount(b"disk", mount.encode(), b"fuse", 6, options):
        sys.exit(os.strerror(ctypes.get_errno()))
    server = Server(folder, device)
    print("ready", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(device, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == device:
                    server.on_request()
                elif order := os.read(0, 1 << 12).decode().strip():
                    server.on_order(order)
                    print("done", flush=True)
                else:
                    return


main(*sys.argv[1:])
