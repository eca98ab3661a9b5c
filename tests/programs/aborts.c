/* A thread that Python does not know calls abort(), as those of NCCL's watchdog and of gloo do when they have thrown. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static const char *said;

static void *die(void *unused)
{
    (void)unused;
    fputs(said, stderr);
    abort();
}

/* Say this on stderr and end the process, from another thread. */
void abort_elsewhere(const char *words)
{
    pthread_t thread;
    said = words;
    pthread_create(&thread, NULL, die, NULL);
}
