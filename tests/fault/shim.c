// Preloaded into every process of a run: it writes down what the run does to the files of one folder, and makes
// a chosen system call fail.
//
//   EDGEFL_SHIM_FOLDER=/abs/folder   the files that are meant: those below it
//   EDGEFL_SHIM_LOG=FILE             append each change of such a file to FILE, in order (see struct record)
//   EDGEFL_SHIM_FAIL=WHO:KIND:N:ERRNO[:on]   in process WHO (supervisor, server, zygote) the N-th call of KIND,
//                                    from 0, fails with ERRNO; with "on" every later one too
//   EDGEFL_SHIM_NOTES=FILE           append "hit WHO KIND" when that happens, and at the end of each of these
//                                    processes "count WHO KIND CALLS"
//
// Calls are counted from the moment when a process is its own: the supervisor's first change below the folder,
// another's giving itself a name (prctl). What an interpreter does before that is not edgefl's to answer for.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
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

enum { MOST_FILES = 4096, LARGE_BYTES = 128 * 1024 };

static const char *kinds[] = {"open", "create", "read", "write", "truncate", "sync", "rename", "unlink", "mkdir",
                              "allocate", "map", "socket", "pipe", "fork", "thread"};
enum { F_OPEN, F_CREATE, F_READ, F_WRITE, F_TRUNCATE, F_SYNC, F_RENAME, F_UNLINK, F_MKDIR,
       F_ALLOCATE, F_MAP, F_SOCKET, F_PIPE, F_FORK, F_THREAD, F_KINDS };

static char folder[PATH_MAX], notes[PATH_MAX];
static size_t folder_bytes;
static int log_fd = -1, owner, counting, fail_kind = -1, fail_on, fail_errno;
static long fail_at, calls[F_KINDS];
static const char *who = "";
static uint64_t watched[MOST_FILES];  // inode + 1 of a descriptor's file, 0 for files that are not meant

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

static void note(const char *text) {
    if (!notes[0]) return;
    int fd = syscall(SYS_openat, AT_FDCWD, notes, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd >= 0) {
        syscall(SYS_write, fd, text, strlen(text));
        syscall(SYS_close, fd);
    }
}

static int fails(int kind) {
    if (!counting || owner != getpid()) return 0;
    long number = __atomic_fetch_add(&calls[kind], 1, __ATOMIC_RELAXED);
    if (kind != fail_kind || (fail_on ? number < fail_at : number != fail_at)) return 0;
    if (number == fail_at) {
        char line[80];
        snprintf(line, sizeof line, "hit %s %s\n", who, kinds[kind]);
        note(line);
    }
    errno = fail_errno;
    return 1;
}

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
    if (fd < 0 || fd >= MOST_FILES || !watched[fd] || fstat(fd, status)) return 0;
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

__attribute__((constructor)) static void begin(void) {
    char line[PATH_MAX] = "", *value;
    owner = getpid();
    if ((value = getenv("EDGEFL_SHIM_FOLDER")) && realpath(value, folder)) folder_bytes = strlen(folder);
    if ((value = getenv("EDGEFL_SHIM_LOG"))) {
        int fd = syscall(SYS_openat, AT_FDCWD, value, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900);
        syscall(SYS_close, fd);
    }
    if ((value = getenv("EDGEFL_SHIM_NOTES"))) snprintf(notes, sizeof notes, "%s", value);
    int fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC, 0);
    long size = syscall(SYS_read, fd, line, sizeof line - 1);
    syscall(SYS_close, fd);
    for (long i = 0; i < size - 1; i++)
        if (!line[i]) line[i] = ' ';
    if (strstr(line, "edgefl.run.server_process")) who = "server";
    else if (strstr(line, "edgefl.run.zygote")) who = "zygote";
    else if (strstr(line, "-m edgefl")) who = "supervisor";
    char wanted[32], kind[32], code[32] = "", on[8] = "";
    if ((value = getenv("EDGEFL_SHIM_FAIL")) &&
        sscanf(value, "%31[^:]:%31[^:]:%ld:%31[^:]:%7s", wanted, kind, &fail_at, code, on) >= 4 &&
        !strcmp(wanted, who)) {
        for (int i = 0; i < F_KINDS; i++)
            if (!strcmp(kind, kinds[i])) fail_kind = i;
        fail_errno = atoi(code);
        fail_on = !strcmp(on, "on");
    }
}

__attribute__((destructor)) static void end(void) {
    if (!counting || owner != getpid()) return;
    char line[80];
    for (int i = 0; i < F_KINDS; i++) {
        snprintf(line, sizeof line, "count %s %s %ld\n", who, kinds[i], calls[i]);
        note(line);
    }
}

int prctl(int option, ...) {
    va_list rest;
    va_start(rest, option);
    unsigned long a = va_arg(rest, unsigned long), b = va_arg(rest, unsigned long), c = va_arg(rest, unsigned long),
                  d = va_arg(rest, unsigned long);
    va_end(rest);
    if (option == PR_SET_NAME && who[0]) counting = 1;
    return syscall(SYS_prctl, option, a, b, c, d);
}

// Opening a file -----------------------------------------------------------------------------------------------

static int opened(int at, const char *path, int flags, mode_t mode) {
    char room[PATH_MAX], link[64];
    const char *whole = at == AT_FDCWD ? absolute(path, room) : path;
    int meant = inside(whole), changes = flags & (O_CREAT | O_TRUNC | O_ACCMODE);
    if (meant && changes && !strcmp(who, "supervisor")) counting = 1;
    if (fails(F_OPEN) || (meant && (flags & O_CREAT) && fails(F_CREATE))) return -1;
    int fd = syscall(SYS_openat, at, path, flags | (sizeof(void *) == 8 ? 0 : O_LARGEFILE), mode);
    if (fd < 0 || fd >= MOST_FILES) return fd;
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

ssize_t read(int fd, void *data, size_t bytes) {
    struct stat status;
    if (watches(fd, &status) && S_ISREG(status.st_mode) && fails(F_READ)) return -1;
    return syscall(SYS_read, fd, data, bytes);
}

static ssize_t did_pread(int fd, void *data, size_t bytes, off_t offset) {
    struct stat status;
    if (watches(fd, &status) && fails(F_READ)) return -1;
    return syscall(SYS_pread64, fd, data, bytes, offset);
}

ssize_t pread(int fd, void *data, size_t bytes, off_t offset) { return did_pread(fd, data, bytes, offset); }
ssize_t pread64(int fd, void *data, size_t bytes, off_t offset) { return did_pread(fd, data, bytes, offset); }

ssize_t write(int fd, const void *data, size_t bytes) {
    struct stat status;
    int meant = watches(fd, &status);
    if (meant && fails(F_WRITE)) return -1;
    ssize_t done = syscall(SYS_write, fd, data, bytes);
    if (meant && done > 0) put(WRITE, status.st_ino, lseek(fd, 0, SEEK_CUR) - done, NULL, NULL, data, done, 0);
    return done;
}

static ssize_t did_pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    struct stat status;
    int meant = watches(fd, &status);
    if (meant && fails(F_WRITE)) return -1;
    ssize_t done = syscall(SYS_pwrite64, fd, data, bytes, offset);
    if (meant && done > 0) put(WRITE, status.st_ino, offset, NULL, NULL, data, done, 0);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) { return did_pwrite(fd, data, bytes, offset); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t offset) { return did_pwrite(fd, data, bytes, offset); }

static int truncated(int fd, off_t size) {
    struct stat status;
    int meant = watches(fd, &status);
    if (meant && fails(F_TRUNCATE)) return -1;
    int done = syscall(SYS_ftruncate, fd, size);
    if (meant && !done) put(TRUNCATE, status.st_ino, size, NULL, NULL, NULL, 0, 0);
    return done;
}

int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off_t size) { return truncated(fd, size); }

int posix_fallocate(int fd, off_t offset, off_t size) {  // says its error instead of setting errno
    if (fails(F_TRUNCATE)) return errno;
    return syscall(SYS_fallocate, fd, 0, offset, size) ? errno : 0;
}

int posix_fallocate64(int fd, off_t offset, off_t size) { return posix_fallocate(fd, offset, size); }

static int synced(int fd, int number) {
    struct stat status;
    char link[64], path[PATH_MAX] = "";
    int meant = watches(fd, &status);
    if (meant && fails(F_SYNC)) return -1;
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
    if (inside(to) && fails(F_RENAME)) return -1;
    int done = syscall(SYS_renameat2, AT_FDCWD, old, AT_FDCWD, new, 0);
    if (!done && inside(to)) put(RENAME, 0, 0, from, to, NULL, 0, 0);
    return done;
}

static int unlinked(const char *path, int flags) {
    char room[PATH_MAX];
    const char *whole = absolute(path, room);
    if (inside(whole) && fails(F_UNLINK)) return -1;
    int done = syscall(SYS_unlinkat, AT_FDCWD, path, flags);
    if (!done && inside(whole)) put(UNLINK, 0, 0, whole, NULL, NULL, 0, 0);
    return done;
}

int unlink(const char *path) { return unlinked(path, 0); }
int rmdir(const char *path) { return unlinked(path, AT_REMOVEDIR); }

int mkdir(const char *path, mode_t mode) {
    char room[PATH_MAX];
    const char *whole = absolute(path, room);
    if (inside(whole) && !strcmp(who, "supervisor")) counting = 1;
    if (inside(whole) && fails(F_MKDIR)) return -1;
    int done = syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (!done && inside(whole)) put(MKDIR, 0, 0, whole, NULL, NULL, 0, 0);
    return done;
}

// Memory, descriptors, processes -------------------------------------------------------------------------------

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);

void *malloc(size_t bytes) { return bytes >= LARGE_BYTES && fails(F_ALLOCATE) ? NULL : __libc_malloc(bytes); }

void *calloc(size_t count, size_t bytes) {
    return bytes && count >= LARGE_BYTES / bytes && fails(F_ALLOCATE) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes) {
    return bytes >= LARGE_BYTES && fails(F_ALLOCATE) ? NULL : __libc_realloc(old, bytes);
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    if (bytes >= LARGE_BYTES && fails(F_ALLOCATE)) return ENOMEM;
    return (*out = __libc_memalign(alignment, bytes)) ? 0 : ENOMEM;
}

static void *mapped(void *at, size_t bytes, int access, int flags, int fd, off_t offset) {
    if (fails(F_MAP)) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, bytes, access, flags, fd, offset);
}

void *mmap(void *at, size_t bytes, int access, int flags, int fd, off_t offset) {
    return mapped(at, bytes, access, flags, fd, offset);
}

void *mmap64(void *at, size_t bytes, int access, int flags, int fd, off_t offset) {
    return mapped(at, bytes, access, flags, fd, offset);
}

int socket(int domain, int type, int protocol) {
    return fails(F_SOCKET) ? -1 : (int)syscall(SYS_socket, domain, type, protocol);
}

int socketpair(int domain, int type, int protocol, int ends[2]) {
    return fails(F_SOCKET) ? -1 : (int)syscall(SYS_socketpair, domain, type, protocol, ends);
}

int pipe2(int ends[2], int flags) { return fails(F_PIPE) ? -1 : (int)syscall(SYS_pipe2, ends, flags); }
int pipe(int ends[2]) { return pipe2(ends, 0); }
int epoll_create1(int flags) { return fails(F_PIPE) ? -1 : (int)syscall(SYS_epoll_create1, flags); }
int eventfd(unsigned start, int flags) { return fails(F_PIPE) ? -1 : (int)syscall(SYS_eventfd2, start, flags); }
int memfd_create(const char *name, unsigned flags) {
    return fails(F_PIPE) ? -1 : (int)syscall(SYS_memfd_create, name, flags);
}

pid_t fork(void) {
    REAL(pid_t, fork, void);
    return fails(F_FORK) ? -1 : real();
}

pid_t vfork(void) {  // a plain fork: what it returns into must be there still
    return fork();
}

int pthread_create(pthread_t *thread, const pthread_attr_t *with, void *(*life)(void *), void *argument) {
    REAL(int, pthread_create, pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    return fails(F_THREAD) ? EAGAIN : real(thread, with, life, argument);
}
