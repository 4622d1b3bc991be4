"""Other libraries' signatures over flashstate's ops: modules with the names of packages stand in for them."""
