# MPI, over which processes talk. Without it ranks are threads of one process, and nothing is said
# about it. Sets LOCKSTEP_HAS_MPI, the target lockstep_mpi, and MPIEXEC_EXECUTABLE: the mpirun that
# belongs to this MPI.

set(LOCKSTEP_MPI AUTO CACHE STRING "Ranks as processes: AUTO (where MPI is found), ON or OFF")
set(LOCKSTEP_HAS_MPI OFF)
if(NOT LOCKSTEP_MPI)
  return()
endif()

set(MPI_CXX_SKIP_MPICXX ON) # the C interface is all we use
find_package(MPI QUIET COMPONENTS CXX)
if(NOT LOCKSTEP_MPI STREQUAL "AUTO")
  lockstep_need(MPI_CXX_FOUND "MPI (LOCKSTEP_MPI=${LOCKSTEP_MPI})" "libopenmpi-dev openmpi-bin")
endif()
if(NOT MPI_CXX_FOUND)
  return()
endif()
set(LOCKSTEP_HAS_MPI ON)

# Its C++ interface, which nobody asked for, would come along with some versions' link line.
set(libraries ${MPI_CXX_LIBRARIES})
list(FILTER libraries EXCLUDE REGEX "mpi_cxx")
add_library(lockstep_mpi INTERFACE)
target_include_directories(lockstep_mpi SYSTEM INTERFACE ${MPI_CXX_INCLUDE_DIRS})
target_compile_definitions(lockstep_mpi INTERFACE ${MPI_CXX_COMPILE_DEFINITIONS})
target_link_libraries(lockstep_mpi INTERFACE ${libraries})
