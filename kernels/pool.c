/* A thread pool. Threads are created when they are first needed, and again in a forked child, which inherits none of
 * them. They sleep between jobs, and ef_pool_close joins them. The pool runs one job at a time: if it is busy, or if no
 * thread can be created, the calling thread does all the work. */
#include "edgefl_kernels.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_THREADS 64

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t work, idle;
    pthread_t thread[MAX_THREADS];
    int size;     /* number of existing threads */
    int stopping; /* 1 if the threads must end */
    int inside;   /* number of threads that work on the job */
    int wanted;   /* number of threads that may still join the job */
    uint64_t job; /* number of the job; a thread joins each job once */
    ef_task task;
    void *context;
    int64_t count, next;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void reset_after_fork(void)
{
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_mutex_init(&in_use, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.idle, NULL);
    pool.size = pool.stopping = pool.inside = pool.wanted = 0;
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, reset_after_fork); }

static void run_tasks(ef_task task, void *context, int64_t count)
{
    for (;;) {
        const int64_t i = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED);
        if (i >= count) return;
        task(context, i);
    }
}

static void *thread_main(void *unused)
{
    uint64_t done = 0;
    (void)unused;
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        while (!pool.stopping && !(pool.wanted && pool.job != done)) pthread_cond_wait(&pool.work, &pool.mutex);
        if (pool.stopping) break;
        done = pool.job;
        pool.wanted--;
        pool.inside++;
        pthread_mutex_unlock(&pool.mutex);
        run_tasks(pool.task, pool.context, pool.count);
        pthread_mutex_lock(&pool.mutex);
        if (--pool.inside == 0) pthread_cond_signal(&pool.idle);
    }
    pthread_mutex_unlock(&pool.mutex);
    return NULL;
}

static void grow(int size)
{
    sigset_t all, before;
    pthread_once(&once, register_fork_handler);
    /* Block all signals in the threads of the pool, so that the interpreter's threads handle them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.size < size && pool.size < MAX_THREADS &&
           !pthread_create(&pool.thread[pool.size], NULL, thread_main, NULL))
        pool.size++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void ef_pool_run(ef_task task, void *context, int64_t count, int threads)
{
    if (threads > count) threads = (int)count;
    if (threads <= 1 || pthread_mutex_trylock(&in_use)) {
        for (int64_t i = 0; i < count; i++) task(context, i);
        return;
    }
    if (pool.size < threads - 1) grow(threads - 1);
    pthread_mutex_lock(&pool.mutex);
    pool.task = task;
    pool.context = context;
    pool.count = count;
    pool.next = 0;
    pool.job++;
    pool.wanted = pool.size < threads - 1 ? pool.size : threads - 1;
    for (int i = 0; i < pool.wanted; i++) pthread_cond_signal(&pool.work);
    pthread_mutex_unlock(&pool.mutex);
    run_tasks(task, context, count);
    pthread_mutex_lock(&pool.mutex);
    pool.wanted = 0; /* a thread that wakes up from now on must not join the job */
    while (pool.inside) pthread_cond_wait(&pool.idle, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
    pthread_mutex_unlock(&in_use);
}

void ef_pool_close(void)
{
    pthread_mutex_lock(&in_use);
    pthread_mutex_lock(&pool.mutex);
    pool.stopping = 1;
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.mutex);
    for (int i = 0; i < pool.size; i++) pthread_join(pool.thread[i], NULL);
    pool.size = pool.stopping = 0;
    pthread_mutex_unlock(&in_use);
}

int ef_pool_size(void) { return pool.size; }
