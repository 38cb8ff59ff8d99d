/* Preloaded into a build: counts the calls that touch a directory, over all of its processes, and lets one go wrong.

   FAIL_UNDER  the directories, absolute, between colons; FAIL_COUNT: a file of 8 bytes, the counter
   FAIL_AT     which call, from 1; FAIL_HOW: kill (before it), after (after it), short (a write does half of what it
               should), or an errno: it fails with that
   FAIL_LOG    a file that gets a line for each call, its name and path */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static long *counter;

static int is_under(const char *path) {
    const char *one = getenv("FAIL_UNDER");
    while (one && *one) {
        size_t length = strcspn(one, ":");
        if (!strncmp(path, one, length) && (path[length] == '/' || !path[length])) return 1;
        one += length + (one[length] == ':');
    }
    return 0;
}

static void told(const char *name, const char *path) {
    const char *log = getenv("FAIL_LOG");
    char line[PATH_MAX + 64];
    if (!log) return;
    int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    int size = snprintf(line, sizeof line, "%s %s\n", name, path);
    syscall(SYS_write, fd, line, size);
    syscall(SYS_close, fd);
}

/* 0: go on; 1: kill after the call; 2: do half of it; -1: fail, errno is set. */
static int turn(const char *name, const char *path) {
    if (!path || !is_under(path)) return 0;
    if (!counter) {
        const char *file = getenv("FAIL_COUNT");
        int fd = file ? syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0) : -1;
        void *found = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        syscall(SYS_close, fd);
        if (found == MAP_FAILED) return 0;
        counter = found;
    }
    long number = __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST);
    const char *at = getenv("FAIL_AT"), *how = getenv("FAIL_HOW");
    told(name, path);
    if (!at || !how || number != atol(at)) return 0;
    if (!strcmp(how, "kill")) kill(0, SIGKILL);
    if (!strcmp(how, "after")) return 1;
    if (!strcmp(how, "short")) return 2;
    errno = atoi(how);
    return -1;
}

static int turn_at(const char *name, int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return turn(name, path);
}

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))
#define DO(type, how, call)                        \
    do {                                           \
        int how_ = how;                            \
        if (how_ < 0) return -1;                   \
        type result_ = call;                       \
        if (how_ == 1) kill(0, SIGKILL);           \
        return result_;                            \
    } while (0)

#define OPEN(name)                                                               \
    int name(const char *path, int flags, ...) {                                 \
        va_list rest;                                                            \
        va_start(rest, flags);                                                   \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;  \
        va_end(rest);                                                            \
        DO(int, turn("open", path), syscall(SYS_openat, AT_FDCWD, path, flags, mode)); \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size) {
    DO(ssize_t, turn_at("write", fd), REAL(write)(fd, data, how_ == 2 ? (size + 1) / 2 : size));
}
int fsync(int fd) { DO(int, turn_at("fsync", fd), REAL(fsync)(fd)); }
int fchmod(int fd, mode_t mode) { DO(int, turn_at("fchmod", fd), REAL(fchmod)(fd, mode)); }
int flock(int fd, int how) { DO(int, turn_at("flock", fd), syscall(SYS_flock, fd, how)); }
int rename(const char *from, const char *to) { DO(int, turn("rename", to), REAL(rename)(from, to)); }
int unlink(const char *path) { DO(int, turn("unlink", path), REAL(unlink)(path)); }
int mkdir(const char *path, mode_t mode) { DO(int, turn("mkdir", path), REAL(mkdir)(path, mode)); }
