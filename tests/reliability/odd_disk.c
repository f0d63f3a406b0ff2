/* Disks that are slow, late or broken once: calls of the C library, with rules that a test gives.
 *
 * Loaded with LD_PRELOAD, so that it reaches Python, torch, safetensors (Rust) and faiss (C++) alike, in the real
 * launched processes. ODD_DISK holds rules, separated by ';', each of fields separated by ',':
 *
 *     rank=1       only in the process whose RANK it is (-1, the default: in all)
 *     call=fsync   fsync, open (also fopen), stat, list (opendir), rename or write
 *     path=TEXT    only for paths that hold this text
 *     sleep_ms=N   sleep first
 *     errno=N      then fail with this
 *     times=N      only the first N calls that match (0: all)
 *     after=N      leave the first N calls that match alone
 *     for_ms=N     only for so long after the first call that matches (0: always)
 *
 * A file that becomes visible late is open, stat and list failing with ENOENT for some time.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define RULES 16

struct rule {
    char call[16], path[256];
    int fail, times, after;
    long sleep_ms, for_ms;
    atomic_long first_ms;
    atomic_int seen;
};

static struct rule rules[RULES];
static int num_rules;

static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000L + t.tv_nsec / 1000000L + 1;
}

__attribute__((constructor)) static void read_rules(void) {
    const char *text = getenv("ODD_DISK"), *rank = getenv("RANK");
    if (!text) return;
    char *copy = strdup(text), *outer, *inner;
    for (char *one = strtok_r(copy, ";", &outer); one && num_rules < RULES; one = strtok_r(NULL, ";", &outer)) {
        struct rule *r = &rules[num_rules];
        memset(r, 0, sizeof *r);
        long only = -1;
        for (char *f = strtok_r(one, ",", &inner); f; f = strtok_r(NULL, ",", &inner)) {
            if (!strncmp(f, "rank=", 5)) only = atol(f + 5);
            else if (!strncmp(f, "call=", 5)) snprintf(r->call, sizeof r->call, "%s", f + 5);
            else if (!strncmp(f, "path=", 5)) snprintf(r->path, sizeof r->path, "%s", f + 5);
            else if (!strncmp(f, "errno=", 6)) r->fail = atoi(f + 6);
            else if (!strncmp(f, "times=", 6)) r->times = atoi(f + 6);
            else if (!strncmp(f, "after=", 6)) r->after = atoi(f + 6);
            else if (!strncmp(f, "sleep_ms=", 9)) r->sleep_ms = atol(f + 9);
            else if (!strncmp(f, "for_ms=", 7)) r->for_ms = atol(f + 7);
            else { dprintf(2, "ODD_DISK: %s is no field\n", f); _exit(99); }
        }
        if (only < 0 || (rank && atol(rank) == only)) num_rules++;
    }
    free(copy);
}

/* Does what the rules say; gives whether the call must fail (errno is then set). */
static int odd(const char *call, const char *path) {
    for (int i = 0; i < num_rules; i++) {
        struct rule *r = &rules[i];
        if (strcmp(r->call, call) || !path || !strstr(path, r->path)) continue;
        int number = atomic_fetch_add(&r->seen, 1);
        if (number < r->after || (r->times && number >= r->after + r->times)) continue;
        long none = 0, now = now_ms();
        atomic_compare_exchange_strong(&r->first_ms, &none, now);
        if (r->for_ms && now - atomic_load(&r->first_ms) > r->for_ms) continue;
        if (r->sleep_ms) {
            struct timespec t = {r->sleep_ms / 1000, (r->sleep_ms % 1000) * 1000000L};
            nanosleep(&t, NULL);
        }
        if (r->fail) {
            errno = r->fail;
            return 1;
        }
    }
    return 0;
}

static const char *path_of(int fd, char *buffer, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buffer, size - 1);
    if (n < 0) return NULL;
    buffer[n] = 0;
    return buffer;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int fd) {
    char b[4096];
    return num_rules && odd("fsync", path_of(fd, b, sizeof b)) ? -1 : REAL(fsync)(fd);
}
ssize_t write(int fd, const void *data, size_t n) {
    char b[4096];
    return num_rules && odd("write", path_of(fd, b, sizeof b)) ? -1 : REAL(write)(fd, data, n);
}
int rename(const char *a, const char *b) { return odd("rename", a) ? -1 : REAL(rename)(a, b); }
DIR *opendir(const char *path) { return odd("list", path) ? NULL : REAL(opendir)(path); }

#define MODE(last) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list l; va_start(l, last); mode = va_arg(l, mode_t); va_end(l); }
int open(const char *p, int flags, ...) { MODE(flags) return odd("open", p) ? -1 : REAL(open)(p, flags, mode); }
int open64(const char *p, int flags, ...) { MODE(flags) return odd("open", p) ? -1 : REAL(open64)(p, flags, mode); }
int openat(int d, const char *p, int flags, ...) { MODE(flags) return odd("open", p) ? -1 : REAL(openat)(d, p, flags, mode); }
int openat64(int d, const char *p, int flags, ...) {
    MODE(flags) return odd("open", p) ? -1 : REAL(openat64)(d, p, flags, mode);
}
FILE *fopen(const char *p, const char *how) { return odd("open", p) ? NULL : REAL(fopen)(p, how); }
FILE *fopen64(const char *p, const char *how) { return odd("open", p) ? NULL : REAL(fopen64)(p, how); }
int stat(const char *p, struct stat *s) { return odd("stat", p) ? -1 : REAL(stat)(p, s); }
int stat64(const char *p, struct stat64 *s) { return odd("stat", p) ? -1 : REAL(stat64)(p, s); }
int lstat(const char *p, struct stat *s) { return odd("stat", p) ? -1 : REAL(lstat)(p, s); }
int lstat64(const char *p, struct stat64 *s) { return odd("stat", p) ? -1 : REAL(lstat64)(p, s); }
int fstatat(int d, const char *p, struct stat *s, int f) { return odd("stat", p) ? -1 : REAL(fstatat)(d, p, s, f); }
int fstatat64(int d, const char *p, struct stat64 *s, int f) { return odd("stat", p) ? -1 : REAL(fstatat64)(d, p, s, f); }
int statx(int d, const char *restrict p, int f, unsigned m, struct statx *restrict s) {
    return odd("stat", p) ? -1 : REAL(statx)(d, p, f, m, s);
}
