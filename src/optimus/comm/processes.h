// The processes of a run and what they tell each other on the host: small numbers and texts, never tensors. One process
// that was not started by an MPI launcher is a group of one and never touches MPI.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "optimus/comm/communicator.h"

namespace optimus {

class Watchdog;

class Processes {
 public:
  virtual ~Processes() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Processes on this machine, and which of them this is.
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;

  // Collective, in the same order on all ranks. Error(kCommunication).
  virtual int64_t max(int64_t value) = 0;
  virtual std::string broadcast(const std::string& text, int root) = 0;
  /// The texts of all ranks in rank order on rank 0; empty elsewhere.
  virtual std::vector<std::string> gather(const std::string& text) = 0;
  virtual void barrier() = 0;

  /// Ends all processes of the run with this exit code. Never returns.
  [[noreturn]] virtual void abort(int code) = 0;

  /// A communicator over CPU memory for the given ranks, ascending, this one among them. Collective over those ranks;
  /// a rank that belongs to several groups makes them in the same order as its peers do. `name` serves messages.
  virtual std::unique_ptr<Communicator> make_communicator(const std::string& name, const std::vector<int>& ranks) = 0;

  /// Watches over the several processes of a run, from the first call on, which is collective over all of them. It says
  /// farewell when the processes' last owner lets go of them. Error(kCommunication).
  std::shared_ptr<Watchdog> watchdog();

 private:
  std::shared_ptr<Watchdog> watchdog_;
};

/// Starts MPI where a launcher (mpirun, mpiexec, srun, PALS) started this process as one of several; once a process.
/// MPI ends with the last of the pointer's copies and of the communicators. After a failure of MPI, or where an exception
/// destroys them, it does not end, since that would wait for the peers: call abort(). Error(kCommunication).
std::shared_ptr<Processes> start_processes();
/// A group of one, whatever started the process.
std::shared_ptr<Processes> make_single_process();

}  // namespace optimus
