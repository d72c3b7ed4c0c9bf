// Preloaded into every process of a run: logs what the run does to the files of one folder.
//
//   EDGEFL_SHIM_FOLDER=/abs/folder   log changes of files below this folder
//   EDGEFL_SHIM_LOG=FILE             append each change to FILE, in order (see struct record)
//   EDGEFL_SHIM_FAIL=KIND:PART:ERRNO:N  after N calls, fail all of KIND (open, write) on paths that contain PART
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, MKDIR };

struct record {  // followed by the path, the other path, the data
    uint32_t kind, process;
    uint64_t inode, offset;
    uint32_t path_bytes, other_bytes, data_bytes, flags;
};

enum { MAX_FILES = 4096 };

static char folder[PATH_MAX];
static size_t folder_bytes;
static int log_fd = -1;
static uint64_t watched[MAX_FILES];  // inode + 1 of a descriptor's file, 0 for files outside the folder

static const char *absolute(const char *path, char *room) {
    if (path[0] == '/' || !getcwd(room, PATH_MAX - 1)) return path;
    size_t used = strlen(room);
    snprintf(room + used, PATH_MAX - used, "/%s", path);
    return room;
}

static int inside(const char *path) {
    return folder_bytes && !strncmp(path, folder, folder_bytes) && (!path[folder_bytes] || path[folder_bytes] == '/');
}

static int watches(int fd, struct stat *status) {
    if (fd < 0 || fd >= MAX_FILES || !watched[fd] || fstat(fd, status)) return 0;
    return watched[fd] == (uint64_t)status->st_ino + 1;
}

static void put(int kind, uint64_t inode, uint64_t offset, const char *path, const char *other, const void *data,
                size_t bytes, int flags) {
    if (log_fd < 0) return;
    int before = errno;
    if (!path) path = "";
    if (!other) other = "";
    struct record head = {kind, getpid(), inode, offset, strlen(path), strlen(other), bytes, flags};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path_bytes}, {(void *)other, head.other_bytes},
                            {(void *)data, bytes}};
    syscall(SYS_writev, log_fd, parts, 4);
    errno = before;
}

static char fail_kind[16], fail_part[128];
static int fail_error;
static long fail_after;

static int fails(const char *kind, const char *path, int fd) {
    char link[64], room[PATH_MAX];
    if (!fail_error || strcmp(kind, fail_kind)) return 0;
    if (!path) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t bytes = readlink(link, room, sizeof room - 1);
        if (bytes < 0) return 0;
        room[bytes] = 0;
        path = room;
    }
    if (!inside(path) || !strstr(path + folder_bytes, fail_part) || fail_after-- > 0) return 0;
    errno = fail_error;
    return 1;
}

// As it is loaded; and again in a forked process whose environment is another.
__attribute__((constructor)) void edgefl_shim_begin(void) {
    char *value;
    if ((value = getenv("EDGEFL_SHIM_FAIL")))
        sscanf(value, "%15[^:]:%127[^:]:%d:%ld", fail_kind, fail_part, &fail_error, &fail_after);
    if ((value = getenv("EDGEFL_SHIM_FOLDER")) && realpath(value, folder)) folder_bytes = strlen(folder);
    if ((value = getenv("EDGEFL_SHIM_LOG"))) {
        int fd = syscall(SYS_openat, AT_FDCWD, value, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900);
        syscall(SYS_close, fd);
    }
}

// Opening a file -----------------------------------------------------------------------------------------------

static int opened(int at, const char *path, int flags, mode_t mode) {
    char room[PATH_MAX], link[64];
    const char *whole = at == AT_FDCWD ? absolute(path, room) : path;
    if (fails("open", whole, -1)) return -1;
    int meant = inside(whole), changes = flags & (O_CREAT | O_TRUNC | O_ACCMODE);
    int fd = syscall(SYS_openat, at, path, flags | (sizeof(void *) == 8 ? 0 : O_LARGEFILE), mode);
    if (fd < 0 || fd >= MAX_FILES) return fd;
    watched[fd] = 0;
    if (!meant) return fd;
    struct stat status;
    int before = errno;
    if (!fstat(fd, &status)) {
        watched[fd] = (uint64_t)status.st_ino + 1;
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        if (changes) put(OPEN, status.st_ino, 0, whole, NULL, NULL, 0, flags & O_TRUNC ? 1 : 0);
    }
    errno = before;
    return fd;
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, int); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE return opened(at, path, flags, mode); }

// Its content --------------------------------------------------------------------------------------------------

ssize_t write(int fd, const void *data, size_t bytes) {
    struct stat status;
    int meant = watches(fd, &status);
    if (meant && fails("write", NULL, fd)) return -1;
    ssize_t done = syscall(SYS_write, fd, data, bytes);
    if (meant && done > 0) put(WRITE, status.st_ino, lseek(fd, 0, SEEK_CUR) - done, NULL, NULL, data, done, 0);
    return done;
}

static ssize_t did_pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    struct stat status;
    int meant = watches(fd, &status);
    if (meant && fails("write", NULL, fd)) return -1;
    ssize_t done = syscall(SYS_pwrite64, fd, data, bytes, offset);
    if (meant && done > 0) put(WRITE, status.st_ino, offset, NULL, NULL, data, done, 0);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) { return did_pwrite(fd, data, bytes, offset); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t offset) { return did_pwrite(fd, data, bytes, offset); }

static int truncated(int fd, off_t size) {
    struct stat status;
    int meant = watches(fd, &status);
    int done = syscall(SYS_ftruncate, fd, size);
    if (meant && !done) put(TRUNCATE, status.st_ino, size, NULL, NULL, NULL, 0, 0);
    return done;
}

int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off_t size) { return truncated(fd, size); }

static int synced(int fd, int number) {
    struct stat status;
    char link[64], path[PATH_MAX] = "";
    int meant = watches(fd, &status);
    int done = syscall(number, fd);
    if (meant && !done) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        if (readlink(link, path, sizeof path - 1) < 0) path[0] = 0;
        put(SYNC, status.st_ino, 0, path, NULL, NULL, 0, S_ISDIR(status.st_mode));
    }
    return done;
}

int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

// Its name -----------------------------------------------------------------------------------------------------

int rename(const char *old, const char *new) {
    char rooms[2][PATH_MAX];
    const char *from = absolute(old, rooms[0]), *to = absolute(new, rooms[1]);
    int done = syscall(SYS_renameat2, AT_FDCWD, old, AT_FDCWD, new, 0);
    if (!done && inside(to)) put(RENAME, 0, 0, from, to, NULL, 0, 0);
    return done;
}

static int unlinked(const char *path, int flags) {
    char room[PATH_MAX];
    const char *whole = absolute(path, room);
    int done = syscall(SYS_unlinkat, AT_FDCWD, path, flags);
    if (!done && inside(whole)) put(UNLINK, 0, 0, whole, NULL, NULL, 0, 0);
    return done;
}

int unlink(const char *path) { return unlinked(path, 0); }
int rmdir(const char *path) { return unlinked(path, AT_REMOVEDIR); }

int mkdir(const char *path, mode_t mode) {
    char room[PATH_MAX];
    const char *whole = absolute(path, room);
    int done = syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (!done && inside(whole)) put(MKDIR, 0, 0, whole, NULL, NULL, 0, 0);
    return done;
}
