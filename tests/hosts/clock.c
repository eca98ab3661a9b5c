/* A wall clock that is off by what stands in /run/clock: a number of nanoseconds, 64 bits. For /etc/ld.so.preload of a host.
 *
 * Linux has namespaces for the monotonic clock but none for the wall clock. The file is mapped, so a clock can be set while
 * programs run. What counts as asking for the wall clock: the calls below; not statically linked programs, nor file times.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { SECOND = 1000000000 };

static volatile const int64_t *mapped;

__attribute__((constructor)) static void start(void)
{
    int file = open("/run/clock", O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *place = mmap(NULL, sizeof *mapped, PROT_READ, MAP_SHARED, file, 0);
    if (place != MAP_FAILED)
        mapped = place;
    close(file);
}

static struct timespec moved(struct timespec at, int64_t by)
{
    int64_t nanoseconds = at.tv_nsec + by % SECOND;
    at.tv_sec += by / SECOND + (nanoseconds >= SECOND) - (nanoseconds < 0);
    at.tv_nsec = (nanoseconds + SECOND) % SECOND;
    return at;
}

static int64_t offset(void)
{
    return mapped ? *mapped : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *now = moved(*now, offset());
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now)
        *now = at.tv_sec;
    return at.tv_sec;
}

/* Deadlines go to the kernel, whose clock is right. A condition may use the monotonic clock instead, and nobody can ask it:
 * but no machine has been up for 31 years, and no wall clock shows less. */
static const struct timespec *deadline(const struct timespec *given, struct timespec *kernels)
{
    if (given->tv_sec < SECOND)
        return given;
    *kernels = moved(*given, -offset());
    return kernels;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec kernels;
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* x86-64 has an older one of another layout */
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return real(condition, mutex, deadline(until, &kernels));
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec kernels;
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_timedwait");
    return real(semaphore, deadline(until, &kernels));
}
