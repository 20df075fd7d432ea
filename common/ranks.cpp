#include "common/ranks.h"

#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <thread>

#include "common/comm_mpi.h"
#include "common/comm_threads.h"
#include "common/device.h"
#include "common/gpu_ranks.h"

namespace lockstep {

// After a failure the other ranks have this long to notice: every wait looks for it.
constexpr double kSecondsToStop = 3;

static int usable_cores() {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  return sched_getaffinity(0, sizeof mine, &mine) == 0 ? std::max(1, CPU_COUNT(&mine)) : 1;
}

// --- What went wrong, in one sentence ---------------------------------------------------------

// The rank that the calling thread is. Global, because the handler of abort() gets no argument;
// thread-local, because ranks can be threads.
static thread_local Communicator* this_rank = nullptr;

class ThisRank {
 public:
  explicit ThisRank(Communicator& world) { this_rank = &world; }
  ~ThisRank() { this_rank = nullptr; }
};

// Plain C, because a program that aborts may not have a heap left.
static void on_abort(int) {
  if (!this_rank) return;
  const std::vector<LedgerEntry>& calls = this_rank->ledger().entries();
  const char* last = calls.empty() ? "none yet" : name_of(calls.back().operation);
  const char* group = calls.empty() ? "" : calls.back().group.c_str();
  char line[300];
  int length =
      std::snprintf(line, sizeof line, "error: rank %d aborted (last operation: %s in \"%s\")\n",
                    this_rank->rank(), last, group);
  if (write(STDERR_FILENO, line, size_t(std::min<int>(length, sizeof line - 1))) < 0) return;
}

// exit() in a rank would end the process, or the job, as if all had succeeded.
static void on_exit() {
  if (!this_rank || this_rank->size() == 1) return;
  std::fprintf(stderr, "error: rank %d called exit()\n", this_rank->rank());
  std::fflush(nullptr);
  std::_Exit(1);
}

struct Complaint {
  std::string sentence;
  std::source_location where;
};

// "rank 2: …", with what the rank did last. Called while the exception is being handled.
static Complaint complaint(int rank, const Ledger& ledger) {
  Complaint c;
  try {
    throw;
  } catch (const Error& e) {
    c = {e.what(), e.where};
  } catch (const std::exception& e) {
    c = {e.what(), {}};
  } catch (...) {
    c = {"something was thrown that is no exception", {}};
  }
  std::string last = "none yet";
  if (!ledger.entries().empty())
    last = text(name_of(ledger.entries().back().operation), " in \"", ledger.entries().back().group,
                "\"");
  c.sentence = text("rank ", rank, ": ", c.sentence, " (last operation: ", last, ")");
  return c;
}

static void print(const Complaint& c) {
  std::fflush(stdout);
  std::string place =
      c.where.line() > 0 ? text("  [", c.where.file_name(), ":", c.where.line(), "]") : "";
  std::fprintf(stderr, "error: %s%s\n", c.sentence.c_str(), place.c_str());
  std::fflush(stderr);
}

// --- Threads ----------------------------------------------------------------------------------

namespace {

// The threads of one run, as the one that started them sees them.
struct Team {
  std::shared_ptr<Failure> failure = std::make_shared<Failure>();
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int> running;
  Complaint first;  // of the rank that failed first
};

}  // namespace

static void be_rank(int rank, std::shared_ptr<Hub> hub, Team& team, Communicator::Options options,
                    int ranks, Device device, const std::function<void(Communicator&)>& body) {
  auto ledger = std::make_shared<Ledger>();
  try {
    std::vector<int> everyone;
    for (int r = 0; r < ranks; ++r) everyone.push_back(r);
    ThreadCommunicator world(hub, rank, "world", everyone, ledger, options);
    ThisRank here(world);
    body(world);
    // What the rank's stream still does must be done before its memory goes to other threads.
    if (device == Device::CUDA) device::synchronize();
    world.barrier();  // a rank that hangs after its last message is missed here
  } catch (...) {
    std::lock_guard lock(team.mutex);
    if (!team.failure->happened) team.first = complaint(rank, *ledger);
    team.failure->report(rank, team.first.sentence);
  }
  std::lock_guard lock(team.mutex);
  team.running.erase(rank);
  team.changed.notify_all();
}

// Waits until all are back. Not for ever, once one has failed: a thread that hangs cannot be ended,
// only the process can.
static void await_team(Team& team) {
  using Clock = std::chrono::steady_clock;
  std::unique_lock lock(team.mutex);
  team.changed.wait(lock, [&] { return team.running.empty() || team.failure->happened; });
  auto limit = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                  std::chrono::duration<double>(kSecondsToStop));
  if (team.changed.wait_until(lock, limit, [&] { return team.running.empty(); })) return;
  print(team.first);
  for (int r : team.running) std::fprintf(stderr, "error: rank %d does not stop\n", r);
  std::_Exit(1);
}

void run_threads(int ranks, Device device, Communicator::Options options,
                 const std::function<void(Communicator& world)>& body) {
  require(ranks > 0, "a run of ", ranks, " ranks: at least one is needed");
  require(device == Device::CPU || device::available(), "there is no GPU for ", ranks, " ranks");
  Team team;
  auto hub = make_hub(ranks, team.failure);
  if (ranks == 1) {  // this very thread: nobody to wait for
    ThreadCommunicator world(hub, 0, "world", {0}, std::make_shared<Ledger>(), options);
    ThisRank here(world);
    return body(world);
  }
  int threads_each = std::min(omp_get_max_threads(), std::max(1, usable_cores() / ranks));
  for (int r = 0; r < ranks; ++r) team.running.insert(r);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r, poison = memory_account()->poison] {
      memory_account() = std::make_shared<MemoryAccount>();
      memory_account()->poison = poison;
      omp_set_num_threads(threads_each);
      be_rank(r, hub, team, options, ranks, device, body);
    });
  await_team(team);
  for (std::thread& t : threads) t.join();
  if (team.failure->happened) throw Error(team.first.sentence, team.first.where);
}

// --- Processes --------------------------------------------------------------------------------

// How many processes a launcher says that it started; 0 if nobody says anything.
static int launched_processes() {
  int most = 0;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (const char* value = std::getenv(name)) most = std::max(most, std::atoi(value));
  return most;
}

// A core for each OpenMP thread; a number that the user has set is left alone.
static void share_cores(int cores, bool speaks) {
  if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(cores);
  if (speaks && omp_get_max_threads() > cores)
    std::fprintf(stderr,
                 "warning: %d OpenMP threads per rank, but only %d core%s: computing will be slow; "
                 "set OMP_NUM_THREADS=%d, or give mpirun --bind-to none\n",
                 omp_get_max_threads(), cores, cores == 1 ? "" : "s", cores);
}

static void print_start(int ranks, const std::string& how, int cores) {
  std::fprintf(stderr, "ranks   %d %s, %d core%s each\n", ranks, how.c_str(), cores,
               cores == 1 ? "" : "s");
}

// Starts NCCL on top of MPI, or fails on all ranks together; the lowest one that could not says
// why.
static std::unique_ptr<Communicator> gpu_world(Communicator& processes, const MpiJob& job,
                                               const Launch& launch) {
  std::unique_ptr<Communicator> world;
  Complaint problem;
  try {
    world = start_gpu_ranks(processes, job.host().first, std::getenv("NCCL_HOSTID"),
                            std::make_shared<Ledger>(), launch.options);
  } catch (const Error& e) {
    problem = {e.what(), e.where};
  }
  int last = processes.size() - 1;
  std::vector<int32_t> mine = {world ? -1 : last - processes.rank()};
  Tensor worst = Tensor::from(mine, {1}, Device::CPU, Category::Buffers);
  processes.all_reduce(worst, ReduceOp::Max).wait();
  if (worst.values<int32_t>()[0] < 0) return world;
  if (worst.values<int32_t>()[0] == mine[0]) print(problem);
  return nullptr;
}

static int run_as_process(MpiJob& job, const Launch& launch,
                          const std::function<void(Communicator& world)>& body) {
  bool gpu = launch.device == Device::CUDA;
  if (job.rank() == 0)
    print_start(job.size(), gpu ? "processes with a GPU each, over NCCL" : "processes over MPI",
                job.host().cores);
  share_cores(job.host().cores, job.rank() == 0);
  Ledger nothing_yet;
  Ledger* ledger = &nothing_yet;
  std::unique_ptr<Communicator> host_world, world;
  try {
    host_world = job.world(launch.options);
    if (gpu && !(world = gpu_world(*host_world, job, launch))) return 1;
    Communicator& all = gpu ? *world : *host_world;
    ledger = &all.ledger();
    ThisRank here(all);
    body(all);
    all.barrier();
    return 0;
  } catch (...) {
    print(complaint(job.rank(), *ledger));
  }
  job.end_all();
  return 1;
}

int run_ranks(const Launch& launch, const std::function<void(Communicator& world)>& body) {
  int started = launched_processes();
  require(started <= 1 || launch.ranks == 1, "--ranks ", launch.ranks,
          " asks for threads in each of the ", started,
          " processes that the launcher started: use one of both");
  std::unique_ptr<MpiJob> job;
  if (started > 0 && launch.ranks == 1) job = join_mpi_job();
  int processes = job ? job->size() : 1;
  require(started <= 1 || processes > 1, "the launcher says that it started ", started,
          " processes, but ", job ? "MPI sees 1" : "this program was built without MPI",
          ": use the mpirun that belongs to the MPI of this build, or --ranks ", started,
          " for threads of one process");
  std::signal(SIGABRT, on_abort);
  std::atexit(on_exit);
  if (processes > 1) return run_as_process(*job, launch, body);

  int cores = std::max(1, usable_cores() / launch.ranks);
  print_start(launch.ranks, launch.ranks == 1 ? "(this process)" : "threads of this process",
              cores);
  if (launch.ranks == 1) share_cores(cores, true);
  try {
    run_threads(launch.ranks, launch.device, launch.options, body);
  } catch (const Error& e) {
    print({e.what(), e.where});
    return 1;
  } catch (const std::exception& e) {
    print({e.what(), {}});
    return 1;
  }
  return 0;
}

}  // namespace lockstep
