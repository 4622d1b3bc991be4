"""Other libraries' signatures over flashstate's ops: a module has the name of the package that it stands in for."""
