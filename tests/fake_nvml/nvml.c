/* A libnvidia-ml.so.1 for tests: answers nvidia-ml-py (pynvml) about GPUs that do not exist.
 *
 *   FAKE_GPUS  one word per GPU, in PCI order: its model, and
 *                MODEL/N   in MIG mode with N instances
 *                !MODEL    lost: fell off the bus
 *                #MODEL    kept from this process by a device cgroup
 *              FAKE_GPUS="H200 A100/3 !H200" is three GPUs; unset or empty is none.
 *   FAKE_GPU_USER   the pid of a process that has 20 GiB of each GPU
 *   FAKE_GPU_USERS  a folder with a file for each process that has memory of GPU 0: its pid is the name, the bytes are the
 *                   content; they are free again as soon as the process is gone
 *   FAKE_NVML_INIT  what nvmlInit returns, e.g. 9: the driver is not loaded
 *
 * GPU n is GPU-n0000000-1111-2222-3333-444444444444 at 0000:n1:00.0; its instance k has the UUID
 * MIG-n000000k-..., GPU instance k + 1 and compute instance 0. GPU n computes 10 (n + 1) percent of the time, and (n + 1) GiB
 * of its memory are in use; of instances, NVML tells only the memory. Every second slot for instances is empty, as on a
 * GPU whose instances were made and removed in turn. Structures and codes as in nvml.h of CUDA 12 and 13.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum code { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, GPU_IS_LOST = 15, OPERATING_SYSTEM = 17 };
enum { MOST_GPUS = 16, MOST_INSTANCES = 7, MOST_USERS = 16 };

struct thing {                       /* what a handle points to: a GPU, or one of its MIG instances */
    struct thing *gpu;               /* of an instance; NULL for a GPU */
    unsigned number;
    char model[64];
    int mig, lost, forbidden;
    unsigned instances;
};
struct memory { unsigned long long total, free, used; };
struct rates { unsigned gpu, memory; };
struct fabric { char cluster[16]; int status; unsigned clique; unsigned char state; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };

static struct thing gpus[MOST_GPUS], slices[MOST_GPUS][MOST_INSTANCES];
static unsigned count;
static int opened_by; /* the process that has the driver open; a child that has closed all descriptors is refused */

int nvmlInitWithFlags(unsigned flags)
{
    const char *code = getenv("FAKE_NVML_INIT"), *words = getenv("FAKE_GPUS");
    char copy[1024], *rest = copy, *word;

    (void)flags;
    if (code && *code)
        return atoi(code);
    if (opened_by && opened_by != getpid())
        return OPERATING_SYSTEM;
    opened_by = getpid();
    snprintf(copy, sizeof copy, "%s", words ? words : "");
    for (count = 0; count < MOST_GPUS && (word = strtok_r(rest, " ", &rest)); count++) {
        struct thing *gpu = &gpus[count];
        char *slash = strchr(word, '/');

        memset(gpu, 0, sizeof *gpu);
        gpu->number = count;
        gpu->lost = *word == '!';
        gpu->forbidden = *word == '#';
        gpu->mig = slash != NULL;
        if (slash) {
            *slash = '\0';
            gpu->instances = (unsigned)atoi(slash + 1);
        }
        snprintf(gpu->model, sizeof gpu->model, "NVIDIA %s", word + (gpu->lost || gpu->forbidden));
        for (unsigned k = 0; k < gpu->instances && k < MOST_INSTANCES; k++)
            slices[count][k] = (struct thing){.gpu = gpu, .number = k};
    }
    return SUCCESS;
}

int nvmlShutdown(void)
{
    opened_by = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    switch (code) {
    case 9: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "some NVML error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *answer) { *answer = count; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct thing **answer)
{
    if (index >= count)
        return INVALID_ARGUMENT;
    if (gpus[index].forbidden)
        return NO_PERMISSION;
    if (gpus[index].lost)
        return GPU_IS_LOST;
    *answer = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(struct thing *it, char *answer, unsigned size)
{
    const char *rest = "1111-2222-3333-444444444444";

    if (it->gpu)
        snprintf(answer, size, "MIG-%x000000%x-%s", it->gpu->number, it->number, rest);
    else
        snprintf(answer, size, "GPU-%x0000000-%s", it->number, rest);
    return SUCCESS;
}

int nvmlDeviceGetName(struct thing *it, char *answer, unsigned size)
{
    if (it->gpu)
        snprintf(answer, size, "%s MIG 1g.10gb", it->gpu->model);
    else
        snprintf(answer, size, "%s", it->model);
    return SUCCESS;
}

/* Whether a process lives: a dead one that nobody has waited for has no memory any more. */
static int lives(int pid)
{
    char path[64];
    unsigned long pages = 0;
    FILE *file;

    snprintf(path, sizeof path, "/proc/%d/statm", pid);
    if (!(file = fopen(path, "r")))
        return 0;
    if (fscanf(file, "%lu", &pages) != 1)
        pages = 0;
    fclose(file);
    return pages > 0;
}

/* Reads which processes of FAKE_GPU_USERS still live, and what they have; returns how many they are. */
static unsigned users(struct process *found, unsigned most)
{
    const char *folder = getenv("FAKE_GPU_USERS");
    DIR *files = folder ? opendir(folder) : NULL;
    struct dirent *entry;
    unsigned known = 0;

    while (files && known < most && (entry = readdir(files))) {
        char path[512];
        int pid = atoi(entry->d_name);
        FILE *file;

        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (pid <= 0 || strchr(entry->d_name, '.') || !lives(pid) || !(file = fopen(path, "r")))
            continue;
        found[known] = (struct process){.pid = (unsigned)pid};
        if (fscanf(file, "%llu", &found[known].used) == 1)
            known++;
        fclose(file);
    }
    if (files)
        closedir(files);
    return known;
}

int nvmlDeviceGetMemoryInfo(struct thing *it, struct memory *answer)
{
    *answer = (struct memory){.total = it->gpu ? 10ULL << 30 : 80ULL << 30};
    answer->used = (unsigned long long)(it->number + 1) << 30;
    if (!it->gpu && !it->number) {
        struct process found[MOST_USERS];

        for (unsigned known = users(found, MOST_USERS); known > 0; known--)
            answer->used += found[known - 1].used;
    }
    answer->free = answer->total - answer->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(struct thing *it, struct rates *answer)
{
    if (it->gpu)
        return NOT_SUPPORTED;
    answer->gpu = 10 * (it->number + 1);
    answer->memory = 1;
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct thing **answer)
{
    char own[96];

    for (unsigned n = 0; n < count; n++) {
        nvmlDeviceGetUUID(&gpus[n], own, sizeof own);
        if (!strcmp(own, uuid) && !gpus[n].lost)
            return *answer = &gpus[n], SUCCESS;
        for (unsigned k = 0; k < gpus[n].instances; k++) {
            nvmlDeviceGetUUID(&slices[n][k], own, sizeof own);
            if (!strcmp(own, uuid))
                return *answer = &slices[n][k], SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetPciInfo_v3(struct thing *it, struct pci *answer)
{
    memset(answer, 0, sizeof *answer);
    answer->bus = it->number * 16 + 1;
    snprintf(answer->address, sizeof answer->address, "00000000:%02X:00.0", answer->bus);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(struct thing *it, unsigned *now, unsigned *pending)
{
    if (!it->mig && strstr(it->model, "RTX"))
        return NOT_SUPPORTED;
    *now = *pending = (unsigned)it->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct thing *it, unsigned *answer)
{
    *answer = it->mig ? 2 * MOST_INSTANCES : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct thing *it, unsigned slot, struct thing **answer)
{
    if (slot % 2 == 0 || slot / 2 >= it->instances)
        return NOT_FOUND;
    *answer = &slices[it->number][slot / 2];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct thing *it, unsigned *answer) { *answer = it->number + 1; return SUCCESS; }
int nvmlDeviceGetComputeInstanceId(struct thing *it, unsigned *answer) { (void)it; *answer = 0; return SUCCESS; }

/* what only the doctor asks */

int nvmlSystemGetDriverVersion(char *answer, unsigned size) { snprintf(answer, size, "580.95.05"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *answer) { *answer = 13000; return SUCCESS; }
int nvmlDeviceGetPersistenceMode(struct thing *it, unsigned *answer) { (void)it; *answer = 1; return SUCCESS; }

int nvmlDeviceGetP2PStatus(struct thing *one, struct thing *other, int kind, int *answer)
{
    (void)one, (void)other, (void)kind;
    *answer = 0;
    return SUCCESS;
}

int nvmlDeviceGetGpuFabricInfo(struct thing *it, struct fabric *answer)
{
    const char *state = getenv("FAKE_FABRIC");
    enum { COMPLETED = 3 };

    (void)it;
    *answer = (struct fabric){.state = state ? (unsigned char)atoi(state) : COMPLETED};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct thing *it, unsigned *count, struct process *answer)
{
    const char *user = getenv("FAKE_GPU_USER");
    struct process found[MOST_USERS + 1];
    unsigned known = it->number ? 0 : users(found, MOST_USERS), room = *count;
    enum { INSUFFICIENT_SIZE = 7 };

    if (user)
        found[known++] = (struct process){.pid = (unsigned)atoi(user), .used = 20ULL << 30};
    *count = known;
    if (known > room)
        return INSUFFICIENT_SIZE;
    memcpy(answer, found, known * sizeof *found);
    return SUCCESS;
}
