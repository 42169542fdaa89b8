// Everything that generated code takes from CUDA's header of this name is in emu.h.
#pragma once
#include "emu.h"
